"""Checks of a run's input, which report all problems at once before any engine starts.

``preflight`` calls the rest.
"""
