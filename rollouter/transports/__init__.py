"""The engines' end of each transport of weights: ``gloo`` on CPU, ``nccl`` on GPU.

Imports ``async_opd.weight_sync``, vLLM and torch.
"""
