"""The training stage: batches, losses, the optimizer step, publication of weights, export.

Imports the rooms of ``async_opd`` below the stages; neither ray nor vllm.
"""
