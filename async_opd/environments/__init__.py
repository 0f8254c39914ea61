"""Environments of episodes: their kinds, and the processes that play them.

Imports config, core, processes and waiting.
"""
