"""``async_opd init``, ``quickstart``, ``completion``: a first config, a first run, a shell's help.

    flags, or answers at a terminal ──draft──► keys ──config_text──► commented YAML ──check──► FILE
    the quickstart's files, of the wheel or the repository ──copied──► DIR ──► async_opd run

``command`` has the subcommands. Imports ``api``, ``config``, ``core`` and ``files``.
"""
