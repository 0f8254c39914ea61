"""``async_opd import``: a run's file of another framework becomes a config of ours.

    file ──parsers──► their keys ──tables/NAME.yaml──► our keys ──command──► commented YAML
                                 ──NAME.together─────►

Files are parsed, never executed. A framework is a table with every key that is known of it, and a
function for what several of its keys give together. A value that could not be read becomes a
placeholder. Imports ``config``, ``core`` and ``files``.
"""
