"""The trainer's files: its state in a checkpoint, scored samples, the exported model.

Imports ``async_opd.files``, ``async_opd.models``, ``trainer.rank_group`` and ``trainer.student``.
"""
