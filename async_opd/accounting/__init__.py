"""What becomes of every sample: admission, ledger, journal, replacements, dead letters, audit.

The driver keeps all of it. Imports ``config``, ``files`` and ``core``.
"""
