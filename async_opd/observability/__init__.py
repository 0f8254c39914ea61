"""Views of a run: run.log, metrics, console, wandb, trace, and the watch for a stalled run.

Imports ``microscope``, ``pictures``, ``processes``, ``config``, ``files``, ``waiting`` and
``core``.
"""
