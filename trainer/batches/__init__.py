"""From samples to what one rank computes: packing, micro-batches, token weights, advantages.

Imports ``async_opd.core`` and ``trainer.losses``.
"""
