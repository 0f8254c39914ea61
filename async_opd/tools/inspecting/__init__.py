"""``async_opd inspect``: recorded tokens of a run on a terminal.

Imports ``report``, ``microscope`` and ``observability``.
"""
