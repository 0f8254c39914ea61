"""What keeps processes alive and ends them: members and their restarts.

May import ``async_opd.config``, ``async_opd.files`` and ``async_opd.core``.
"""
