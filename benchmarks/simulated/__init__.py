"""Engines that take time but compute nothing, behind the Protocols of the real ones.

Only benchmarks can build them: they are not part of the installed package, and no config names
them. Their speeds are those of ``async_opd.config.sections.plan``, so that the planner can be held
against them.
"""
