"""vLLM's kernels of CPUs: they compute with packed copies of some weights, and may use AMX."""

from __future__ import annotations

from typing import Any

import torch


def allow_amx() -> None:
    """Asks the kernel for AMX in this process, if its CPU has it. Workers call it when imported.

    vLLM's attention in bfloat16 uses AMX where the CPU has it, and does not ask: the process ends
    with SIGILL, without a traceback (measured with vLLM 0.32 on Linux 6.18).
    """
    if torch.cpu._is_amx_tile_supported():
        torch.cpu._init_amx()


def pack_again(model: Any, head: type) -> None:
    """Packs what vLLM's layer-wise reload leaves as it was, on a CPU; ``head``: ParallelLMHead.

    The reload leaves the packed copy of a head that shares its tensor with the embedding as it was,
    and a mixture's experts unpacked (measured with vLLM 0.32: logits off by 2 nats in both cases).
    """
    for module in model.modules():
        method: Any = getattr(module, "quant_method", None)
        if isinstance(module, head):
            method.process_weights_after_loading(module)
        elif (kernel := getattr(method, "moe_kernel", None)) is not None:
            kernel.fused_experts.process_weights_after_loading(module)
