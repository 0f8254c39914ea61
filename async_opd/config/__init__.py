"""The config of a run: frozen pydantic sections, and their loading from YAML and overrides.

``run_config`` has all sections together, ``load`` reads them. ``registry`` names the modules of
sources and transports. Imports ``core``.
"""
