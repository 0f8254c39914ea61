"""Checkpoints: the store on disk, the checkpointer of a running run, and ``--resume``.

Imports ``observability`` (the run's file names), ``accounting``, ``models`` (the student's size),
``config``, ``files``, ``core``.
"""
