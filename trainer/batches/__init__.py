"""From samples to what one rank computes: packing, micro-batches, token weights, advantages.

Imports rooms of ``async_opd`` below the stages; of the trainer ``losses``, ``vision``, the batcher
and the group of ranks.
"""
