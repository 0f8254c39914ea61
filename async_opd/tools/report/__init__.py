"""Finished and running runs, read from their directories: verdict, report, comparison.

Imports ``plan``, ``checks``, ``checkpoint`` (a mirror's copy), ``observability``, ``accounting``,
``config``, ``files`` and ``core``.
"""
