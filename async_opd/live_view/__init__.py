"""A run on a terminal: the live display, plain lines, the end screen, and ``async_opd watch``.

Imports ``report`` and ``observability``.
"""
