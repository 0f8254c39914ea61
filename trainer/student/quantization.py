"""The student's matrices in low precision: rounded before they are sent, or as engines have them.

By ``sync.fake_quantization`` the sender rounds them as a scheme would:

    named weights ──matrices of layers──► scale of each group ──round──► the same dtype and shape

A group of entries shares the scale of its largest one: all of a matrix (fp8_per_tensor), a row
(int8_per_channel), 32 entries of a row (int4_group32, mxfp8, mxfp4), 16 of them (nvfp4), a block of
128 rows and columns (fp8_per_block). Integers of b bits are the 2^b - 1 numbers from
-(2^(b-1) - 1) to 2^(b-1) - 1, without zero points; float4 are 0, 0.5, 1, 1.5, 2, 3, 4, 6 and their
negatives. Scales are float32; of mxfp8 and mxfp4 the least powers of two that cut no entry; of
nvfp4 float8, times a float32 of the matrix. Activations stay as they are.

Held rows are computed with the same matrices (``SentMatrices``), so that the proof of freshness is
as sharp as without the rounding.

An engine may quantize what it loads (``rollout.engine.quantization``):

    a matrix that is sent ──channels──► float8 [n, m], float32 scales [n, 1] ──► digests

vLLM does that with the arithmetic of this module: the digests of both are equal, bit
by bit (tests/contracts/test_quantization.py, tests/rollouter/test_quantized_engine.py).
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import torch

from async_opd.core.errors import StageError
from async_opd.weight_sync.layout import tensors_of_an_expert

if TYPE_CHECKING:
    from async_opd.config.precision import FakeQuantization

KEPT = re.compile(r"(embed|wte|lm_head|router|(?:\b|_)gate\.weight|visual|vision|projector)")
"""Parts of the names of matrices that online quantization leaves as they are."""
FP8_LARGEST = 448.0
"""The largest number of float8_e4m3fn."""
FP4_LARGEST = 6.0


class Grid(NamedTuple):
    """Rows and columns of a group, None for all.

    Numbers are integers from ``-integer`` to it; for None they are float4 or float8. ``scales``:
    see the module.
    """

    rows: int | None
    columns: int | None
    integer: int | None = None
    float4: bool = False
    scales: Literal["float32", "power of two", "float8"] = "float32"

    @property
    def largest(self) -> float:
        """The largest number."""
        return float(self.integer or (FP4_LARGEST if self.float4 else FP8_LARGEST))


GRIDS: dict[FakeQuantization, Grid] = {
    "fp8_per_tensor": Grid(None, None),
    "fp8_per_block": Grid(128, 128),
    "mxfp8": Grid(1, 32, scales="power of two"),
    "int8_per_channel": Grid(1, None, 127),
    "int4_group32": Grid(1, 32, 7),
    "mxfp4": Grid(1, 32, float4=True, scales="power of two"),
    "nvfp4": Grid(1, 16, float4=True, scales="float8"),
    "int2_group32": Grid(1, 32, 1),
}


def fake_quantized(
    weights: Iterator[tuple[str, torch.Tensor]], scheme: FakeQuantization
) -> Iterator[tuple[str, torch.Tensor]]:
    """The weights by name, the matrices of layers rounded; others are passed on."""
    for name, tensor in weights:
        if tensor.ndim < 2 or KEPT.search(name):
            yield name, tensor
        elif tensor.ndim == 2:
            yield name, rounded(tensor, GRIDS[scheme])
        else:  # experts, with several matrices of each one above the other
            beside = len(tensors_of_an_expert(name)) or 1
            matrices = tensor.view(-1, tensor.shape[-2] // beside, tensor.shape[-1])
            each = torch.stack([rounded(matrix, GRIDS[scheme]) for matrix in matrices])
            yield name, each.view(tensor.shape)


def rounded(matrix: torch.Tensor, grid: Grid) -> torch.Tensor:
    """A matrix [n, m] on the grid, in its own dtype. Groups at the edges are smaller."""
    n, m = matrix.shape
    rows, columns = min(grid.rows or n, n), min(grid.columns or m, m)
    padded = torch.nn.functional.pad(matrix.float(), (0, -m % columns, 0, -n % rows))
    groups = padded.view(padded.shape[0] // rows, rows, padded.shape[1] // columns, columns)
    scale = _scales(groups.abs().amax((1, 3), keepdim=True), grid)
    scaled = (groups / torch.where(scale > 0, scale, 1.0)).clamp(-grid.largest, grid.largest)
    if grid.integer is not None:
        scaled = scaled.round()
    elif grid.float4:
        size = scaled.abs()
        step = torch.where(size < 2, 0.5, torch.where(size < 4, 1.0, 2.0))
        scaled = (scaled / step).round() * step
    else:
        scaled = scaled.to(torch.float8_e4m3fn).float()
    return (scaled * scale).view_as(padded)[:n, :m].to(matrix.dtype)


def _scales(peaks: torch.Tensor, grid: Grid) -> torch.Tensor:
    """The scales of groups with these largest entries, float32; 0 for a group of zeros."""
    if grid.scales == "power of two":
        return (peaks / grid.largest).log2().ceil().exp2()
    if grid.scales == "float8":
        whole = peaks.max() / (grid.largest * FP8_LARGEST)
        each = peaks / grid.largest / torch.where(whole > 0, whole, 1.0)
        return each.to(torch.float8_e4m3fn).float() * whole
    return peaks / grid.largest


@dataclass(frozen=True)
class SentMatrices:
    """The matrices of a student's layers as they are sent: in ``dtype``, rounded by a scheme."""

    dtype: torch.dtype
    scheme: FakeQuantization

    @contextmanager
    def within(self, student: torch.nn.Module) -> Iterator[None]:
        """The student's linear layers compute with their matrices as sent, during the block.

        Of a sharded student a layer's matrix is whole while it computes. StageError if one that is
        rounded is not of a linear layer.
        """
        handles = []
        try:
            for name, parameter in student.named_parameters():
                if parameter.ndim < 2 or KEPT.search(name):
                    continue
                layer = student.get_submodule(name.rpartition(".")[0])
                if not isinstance(layer, torch.nn.Linear):
                    cause = (
                        f"{name} is not the matrix of a linear layer: the trainer cannot compute "
                        "held rows with it as it is sent"
                    )
                    raise StageError("trainer", cause, "set sync.verify_every: 0")
                handles.append(layer.register_forward_hook(self._compute))
            yield
        finally:
            for handle in handles:
                handle.remove()

    def _compute(self, layer: Any, given: tuple[torch.Tensor, ...], _: Any) -> torch.Tensor:
        """A forward hook: the result with the layer's matrix as sent."""
        sent = rounded(layer.weight.detach().to(self.dtype), GRIDS[self.scheme])
        return torch.nn.functional.linear(given[0], sent.to(layer.weight.dtype), layer.bias)


WHOLE = re.compile(r"(embed|wte|lm_head)")
"""Parts of the names of matrices that no online quantization changes."""
SMALLEST_SCALE = 1 / (FP8_LARGEST * 512)
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
    scales = (largest / largest.new_tensor(FP8_LARGEST)).clamp_min(SMALLEST_SCALE)
    rows = max(1, PART_ENTRIES // max(1, matrix.shape[1]))
    numbers = torch.empty_like(matrix, dtype=torch.float8_e4m3fn)
    for start in range(0, len(matrix), rows):
        part = slice(start, start + rows)
        numbers[part] = (matrix[part] / scales[part]).clamp_(-FP8_LARGEST, FP8_LARGEST)
    return numbers, scales
