"""Checkpoints: the store on disk, the checkpointer of a running run, and ``--resume``.

Imports ``observability``, ``grading`` and ``microscope`` (the run's files), ``accounting``,
``models`` (the student's size), ``config``, ``files``, ``waiting``, ``core``.
"""
