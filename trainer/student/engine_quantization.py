"""The student's matrices as a quantized engine has them (``rollout.engine.quantization``).

    a matrix that is sent ──channels──► float8 [n, m], float32 scales [n, 1] ──► digests

vLLM quantizes what it loads, with the arithmetic of this module: the digests of both are equal, bit
by bit (tests/contracts/test_quantization.py, tests/rollouter/test_quantized_engine.py).
"""

from __future__ import annotations

import re
from collections.abc import Iterator

import torch

WHOLE = re.compile(r"(embed|wte|lm_head)")
"""Parts of the names of matrices that no online quantization changes."""
LARGEST = torch.finfo(torch.float8_e4m3fn).max
SMALLEST_SCALE = 1 / (LARGEST * 512)
"""512 is the reciprocal of the smallest positive number of float8_e4m3fn."""
PART_ENTRIES = 1 << 24
"""Of a matrix that are quantized at a time: the quotients are float32."""


def parts_of(name: str, tensor: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
    """Float8 numbers and scales of a sent matrix of a layer, by name; of others nothing."""
    if tensor.ndim == 2 and not WHOLE.search(name):
        numbers, scales = channels(tensor)
        yield name, numbers
        yield f"{name}_scale", scales


def channels(matrix: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """A matrix [n, m] as float8_e4m3fn [n, m] and scales float32 [n, 1], one for each row."""
    largest = matrix.abs().amax(1, keepdim=True).float()
    # by a tensor: torch multiplies by the reciprocal of a number, which may round otherwise
    scales = (largest / largest.new_tensor(LARGEST)).clamp_min(SMALLEST_SCALE)
    rows = max(1, PART_ENTRIES // max(1, matrix.shape[1]))
    numbers = torch.empty_like(matrix, dtype=torch.float8_e4m3fn)
    for start in range(0, len(matrix), rows):
        part = slice(start, start + rows)
        numbers[part] = (matrix[part] / scales[part]).clamp_(-LARGEST, LARGEST)
    return numbers, scales
