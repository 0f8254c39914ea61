"""Finished and running runs, read from their directories: verdict, report, comparison.

Imports ``plan``, ``observability``, ``accounting``, ``config``, ``files`` and ``core``.
"""
