"""The message queue between the stages: topics, leases, and how large their messages are.

Imports ``models``, ``processes``, ``config``, ``waiting`` and
``core``.
"""
