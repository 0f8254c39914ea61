"""``async_opd import``: a run's file of another framework becomes a config of ours.

    file ──parsers──► their keys ──table of the framework──► our keys ──written──► commented YAML

Files are parsed, never executed. Each framework is one module: a table with every key that it
knows, and one function for what several of its keys say together. Imports ``config``, ``core`` and
``files``.
"""
