"""Members, their restarts and their ends.

Imports ``config``, ``files``, ``waiting`` and ``core``.
"""
