"""Checkpoints: the store on disk, the checkpointer of a running run, ``--resume``, and the mirror.

Imports ``data``, ``observability``, ``grading``, ``microscope`` and ``pictures``
(the run's files),
``accounting``, ``models`` (the student's size), ``processes`` (the mirror's thread), ``config``,
``files``, ``waiting``, ``core``.
"""
