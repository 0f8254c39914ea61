"""Records of single tokens: which samples have one, its columns, its files.

The trainer's ranks write them, ``async_opd inspect`` and the report read them.
"""
