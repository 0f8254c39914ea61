"""Graders, the processes that they run in, and evaluation, which uses them.

Imports ``accounting`` (the step of an evaluation), ``data`` and ``models`` (its prompts and their
text), ``pictures``, ``processes``, ``config``, ``files``, ``waiting`` and ``core``.
"""
