"""Everything that needs neither torch, ray nor vllm: messages, config, stage logic, accounting.

An import-linter contract keeps it that way, so that ``async_opd check`` answers in a fraction of a
second and the whole pipeline can be tested in one process on fakes.
"""
