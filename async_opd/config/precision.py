"""Schemes by which vLLM quantizes weights while it loads them (its online quantization).

    engine.quantization ──Scheme──► bytes of a weight (memory plans), devices (``async_opd check``)

Embedding and head stay as they are. tests/contracts/test_quantization.py compares the table with
vLLM's own.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Quantization = Literal[
    "fp8_per_tensor",
    "fp8_per_block",
    "fp8_per_channel",
    "mxfp8",
    "mxfp4",
    "int8_per_channel_weight_only",
    "nvfp4_per_token",
]
FakeQuantization = Literal[
    "fp8_per_tensor",
    "fp8_per_block",
    "mxfp8",
    "int8_per_channel",
    "int4_group32",
    "mxfp4",
    "nvfp4",
    "int2_group32",
]
CacheDtype = Literal["auto", "bfloat16", "fp8", "fp8_e4m3", "fp8_e5m2"]
NEWEST = 1000
"""Above every compute capability."""


@dataclass(frozen=True)
class Scheme:
    """``nbytes`` of a weight, its part of the scales included.

    ``capabilities`` are those of GPUs that have a kernel, 10 times the number (89 for 8.9).
    ``experts``: only the experts of a mixture are quantized. ``known``: the trainer quantizes its
    own weights by it as vLLM does, bit by bit (``trainer.student.quantization``).
    """

    nbytes: float
    capabilities: range
    on_cpu: bool = False
    experts: bool = False
    known: bool = False


SCHEMES: dict[Quantization, Scheme] = {
    "fp8_per_tensor": Scheme(
        1.0, range(75, NEWEST)
    ),  # below 8.9 by Marlin, which reads float8 only
    "fp8_per_block": Scheme(1 + 4 / 128**2, range(75, NEWEST)),
    "fp8_per_channel": Scheme(
        1.01, range(89, NEWEST), on_cpu=True, known=True
    ),  # a float32 for each row
    "mxfp8": Scheme(1 + 1 / 32, range(75, NEWEST)),
    "mxfp4": Scheme(1 / 2 + 1 / 32, range(75, NEWEST)),
    "int8_per_channel_weight_only": Scheme(1.01, range(75, NEWEST), experts=True),
    "nvfp4_per_token": Scheme(1 / 2 + 1 / 16, range(100, 110), experts=True),
}
CACHES_ON_CPU: frozenset[CacheDtype] = frozenset({"auto", "fp8", "fp8_e4m3", "fp8_e5m2"})
"""Types of a KV cache that vLLM's attention on a CPU has kernels for."""
