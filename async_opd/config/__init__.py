"""What a run is: frozen pydantic sections, and how YAML and overrides become one ``RunConfig``.

``run_config`` holds the sections together, ``load`` reads them. ``registry`` names the
modules of sources and transports. Imports ``core``.
"""
