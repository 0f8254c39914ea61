"""Processes kept alive and ended: members and their restarts.

Imports ``config``, ``files``, ``waiting`` and ``core``.
"""
