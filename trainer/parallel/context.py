"""The ranks among which every packed row is cut: one dimension of the trainer's ranks.

row of T tokens ──share──► T/c tokens on each of c ranks ──decoder, loss──► values of its tokens
                                    ▲ attention exchanges heads for tokens (``exchange.py``)

Ranks of a context are consecutive, so that those of a node exchange with each other.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from trainer.notes import note
from trainer.parallel.exchange import all_gather, attend_across
from trainer.parallel.shares import AnyRow, share_of
from trainer.student.attention import (
    FLASH,
    VARLEN,
    Kernel,
    by_sequence,
    flash_attn,
    register_kernel,
    varlen,
)
from trainer.vision.parts import attention_of, set_attention_of

ACROSS = "packed_across_ranks"
"""Name in transformers' registry."""
KERNELS: dict[str, Kernel] = {VARLEN: varlen, FLASH: flash_attn}
"""What computes a rank's heads, by the attention that one rank alone would have."""


@dataclass(frozen=True)
class Context:
    """This rank's place among ``size`` ranks that share each row."""

    group: Any
    rank: int
    size: int

    @classmethod
    def join(cls, size: int, timeout_s: float) -> Context | None:
        """This rank's place among ``size`` ranks; None for 1. All ranks of a trainer call it.

        An exchange that lasts longer than ``timeout_s`` seconds is an error.
        """
        if size == 1:
            return None
        bound = timedelta(seconds=timeout_s)
        group, _ = dist.new_subgroups(size, timeout=bound)  # type: ignore[no-untyped-call]
        return cls(group, dist.get_rank(group), size)

    def set_attention(self, model: Any) -> None:
        """Has the model attend across the ranks, by the kernel that it has been given.

        ``sdpa`` and ``eager`` become sdpa of one sequence after the other.
        """
        heads = model.config.get_text_config().num_attention_heads
        if heads % self.size:
            ranks = f"{heads} heads do not divide by {self.size} ranks"
            note(f"attention: {ranks}, which gather all keys and values of a row")
        kernel = KERNELS.get(attention_of(model), by_sequence)
        register_kernel(ACROSS, partial(attend_across, kernel, self.group))
        set_attention_of(model, ACROSS)

    def share(self, row: AnyRow) -> AnyRow:
        """This rank's share of a row (see ``shares.py``)."""
        return share_of(row, self.rank, self.size)

    def gather(self, shares: torch.Tensor, tokens: int) -> torch.Tensor:
        """The values of all ``tokens`` of a row, from those of this rank's share; a collective."""
        return all_gather(shares, self.group)[:tokens]

    def sum(self, tensor: torch.Tensor) -> None:
        """Sums the tensor over the ranks, in place; a collective."""
        dist.all_reduce(tensor, group=self.group)
