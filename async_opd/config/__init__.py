"""The config of a run: its sections (``sections/``), and their loading from YAML and overrides.

``run_config`` joins the sections, ``load`` reads them. ``registry`` names the modules of
sources and transports.
"""
