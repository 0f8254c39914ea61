"""The sections of a config: frozen pydantic classes, one noun a file.

The docstring under a field is its documentation. Imports ``core``.
"""
