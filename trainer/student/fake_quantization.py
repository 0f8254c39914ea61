"""Weights rounded as a scheme of low precision would, at the sender (``sync.fake_quantization``).

    named weights ──matrices of layers──► scale of each group ──round──► the same dtype and shape

A group of entries shares the scale of its largest one: all of a matrix (fp8_per_tensor), a row
(int8_per_channel), 32 entries of a row (int4_group32), a block of 128 rows and columns
(fp8_per_block). Integers of b bits are the 2^b - 1 numbers from -(2^(b-1) - 1) to 2^(b-1) - 1,
without zero points. Scales are float32, and activations stay as they are.

Held rows are computed with the same matrices (``SentMatrices``), so that the proof of freshness is
as sharp as without the rounding.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from async_opd.core.errors import StageError

if TYPE_CHECKING:
    from async_opd.config.precision import FakeQuantization

KEPT = re.compile(r"(embed|wte|lm_head|router|(?:\b|_)gate\.weight|visual|vision|projector)")
"""Parts of the names of matrices that online quantization leaves as they are."""
FP8_LARGEST = 448.0
"""The largest number of float8_e4m3fn."""


class Grid(NamedTuple):
    """Rows and columns of a group, None for all; ``bits`` of an integer, None for float8."""

    rows: int | None
    columns: int | None
    bits: int | None = None


GRIDS: dict[FakeQuantization, Grid] = {
    "fp8_per_tensor": Grid(None, None),
    "fp8_per_block": Grid(128, 128),
    "int8_per_channel": Grid(1, None, 8),
    "int4_group32": Grid(1, 32, 4),
    "int2_group32": Grid(1, 32, 2),
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
        else:  # stacked experts
            matrices = tensor.view(-1, *tensor.shape[-2:])
            each = torch.stack([rounded(matrix, GRIDS[scheme]) for matrix in matrices])
            yield name, each.view(tensor.shape)


def rounded(matrix: torch.Tensor, grid: Grid) -> torch.Tensor:
    """A matrix [n, m] on the grid, in its own dtype. Groups at the edges are smaller."""
    n, m = matrix.shape
    rows, columns = min(grid.rows or n, n), min(grid.columns or m, m)
    padded = torch.nn.functional.pad(matrix.float(), (0, -m % columns, 0, -n % rows))
    groups = padded.view(padded.shape[0] // rows, rows, padded.shape[1] // columns, columns)
    largest = FP8_LARGEST if grid.bits is None else float(2 ** (grid.bits - 1) - 1)
    scale = groups.abs().amax((1, 3), keepdim=True) / largest
    scaled = groups / torch.where(scale > 0, scale, 1.0)
    if grid.bits is None:
        scaled = scaled.clamp(-largest, largest).to(torch.float8_e4m3fn).float()
    else:
        scaled = scaled.round()
    return (scaled * scale).view_as(padded)[:n, :m].to(matrix.dtype)


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
