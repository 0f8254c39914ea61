"""How fast the parts of a finished run were, from the files of its run directory.

Imports ``observability`` and ``files``.
"""
