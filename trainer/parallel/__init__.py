"""Ranks beyond a single dimension of shards: rows cut over ranks, and copies of the shards.

    ranks = replicate × shard × context      a row's tokens lie on ``context`` ranks side by side

The parameters lie on all shard × context ranks of one copy (``student/sharding.py``). The work of
ranks other than the first is in ``follower``.
"""
