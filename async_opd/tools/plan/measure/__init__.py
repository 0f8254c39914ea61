"""Measures the speeds of a finished run's parts, from the files of its run directory.

Imports ``observability`` and ``files``.
"""
