"""The outcome of every sample: admission, ledger, journal, replacements, dead letters, audit.

The driver holds all of these objects.
"""
