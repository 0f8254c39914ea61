"""Graders, the processes that they run in, and evaluation, which uses them.

Imports ``accounting`` (the step of an evaluation), ``processes``, ``config``,
``waiting`` and ``core``.
"""
