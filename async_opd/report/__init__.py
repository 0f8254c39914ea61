"""Finished and running runs, read from their directories: verdict, report, comparison.

Imports ``plan``, ``checks``, ``observability``, ``accounting``, ``config``, ``files`` and ``core``.
"""
