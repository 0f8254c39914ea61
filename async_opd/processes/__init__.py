"""What keeps processes alive and ends them: members and their restarts.

May import ``async_opd.core`` and no room beside it.
"""
