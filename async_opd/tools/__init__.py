"""The commands beside ``run``: a run needs none of them, and nothing imports them.

``async_opd.cli`` loads the one that is called, by its name. May import all rooms.
"""
