"""Checkpoints: the store on disk, who takes them while the run goes on, and ``--resume``.

Imports ``observability`` (the run's file names), ``accounting``, ``config``, ``files``, ``core``.
"""
