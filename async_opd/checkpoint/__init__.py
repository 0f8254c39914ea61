"""Checkpoints: the store on disk, the checkpointer of a run, ``--resume``, and the mirror."""
