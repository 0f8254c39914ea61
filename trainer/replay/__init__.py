"""The batches of steps and what became of the weights, kept on the disk and computed again.

``kept_step`` is the file, ``keeper`` writes it beside training, with digests of the weights, and
``replayer`` computes kept steps again. ``async_opd.tools.replay`` is the command.
"""
