"""The ranks among which every packed row is cut: one dimension of the trainer's ranks.

row of T tokens ──share──► T/c tokens on each of c ranks ──decoder, loss──► values of its tokens
                                    ▲ attention exchanges heads for tokens

    row        │ a a a a a b b │ b c c d d d · │     T = 13 tokens of 4 sequences, one of padding
    share          rank 0          rank 1            7 tokens each

A sequence may lie in several shares. Each rank knows where all sequences of the row begin, since
attention reads them whole; response tokens belong to the rank with the row of logits that predicts
them. Ranks of a context are consecutive, so that those of a node exchange with each other.

    each rank: all heads of its tokens ──all-to-all──► its heads of all tokens ──kernel──┐
    each rank: all heads of its tokens ◄──────────────────all-to-all─────────────────────┘

This is DeepSpeed-Ulysses (arXiv:2309.14509). Keys and values of fewer heads than ranks are sent to
several ranks. Where the queries' heads do not divide by the ranks, every rank gathers keys and
values of all tokens, and computes its own tokens' queries; the last rank has the most to compute.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from datetime import timedelta
from functools import partial
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch.autograd.function import once_differentiable

from trainer.batches.packing import Packed, Row
from trainer.losses.base import TeacherStates, Tokens
from trainer.notes import note
from trainer.student.attention import (
    FLASH,
    VARLEN,
    Kernel,
    Ragged,
    by_sequence,
    flash_attn,
    register_kernel,
    varlen,
)
from trainer.vision.parts import attention_of, set_attention_of

ACROSS = "packed_across_ranks"
"""Name in transformers' registry."""
KERNELS: dict[str, Kernel] = {VARLEN: varlen, FLASH: flash_attn}
"""Computes a rank's heads, by the attention that one rank alone would have."""
AnyRow = TypeVar("AnyRow", bound=Row)


class _AllToAll(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, parts: torch.Tensor, group: Any) -> torch.Tensor:
        ctx.group = group
        return _exchange(parts, group)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        return _exchange(gradient, ctx.group), None


def _exchange(parts: torch.Tensor, group: Any) -> torch.Tensor:
    sent = parts.contiguous()
    received = torch.empty_like(sent)
    dist.all_to_all_single(received, sent, group=group)
    return received


def all_to_all(parts: torch.Tensor, group: Any) -> torch.Tensor:
    """Sends part i of [ranks, ...] to rank i; returns the parts of all ranks in their order.

    A collective, also in the backward pass. All parts have the same shape on every rank.
    """
    return _AllToAll.apply(parts, group)  # type: ignore[no-any-return, no-untyped-call]


def all_gather(tensor: torch.Tensor, group: Any) -> torch.Tensor:
    """The tensors [n, ...] of all ranks, [ranks * n, ...]; the backward pass sums gradients."""
    return all_to_all(tensor.expand(dist.get_world_size(group), *tensor.shape), group).flatten(0, 1)


def attend_across(
    kernel: Kernel,
    group: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    ragged: Ragged,
) -> torch.Tensor:
    """The kernel's attention for this rank's share of a row, [n, heads, D]; a collective.

    Every rank of the group has n consecutive tokens, in the order of ranks. ``ragged`` is of the
    whole row.
    """
    ranks, heads = dist.get_world_size(group), query.shape[1]
    if heads % ranks:
        keys, values = all_gather(torch.stack((key, value), 1), group).unbind(1)
        return _queries_of_share(kernel, dist.get_rank(group), query, keys, values, ragged)
    copies = ranks // math.gcd(key.shape[1], ranks)
    if copies > 1:
        key, value = (tensor.repeat_interleave(copies, dim=1) for tensor in (key, value))
    shape = (len(query), ranks, -1, query.shape[-1])
    parts = [tensor.reshape(shape) for tensor in (query, key, value)]
    sent = torch.cat(parts, dim=2).transpose(0, 1)  # rank, token, heads of three, D
    received = all_to_all(sent, group).flatten(0, 1)
    own = torch.split(received, [part.shape[2] for part in parts], dim=1)
    out = kernel(own[0], own[1], own[2], ragged)
    back = all_to_all(out.reshape(ranks, -1, *out.shape[1:]), group)
    return back.transpose(0, 1).flatten(1, 2)


def _queries_of_share(
    kernel: Kernel,
    rank: int,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    ragged: Ragged,
) -> torch.Tensor:
    """The attention of this rank's queries, with the keys and values of all tokens.

    A sequence that began on a rank before has more keys than queries here. On a GPU it waits for
    the device once, to cut keys that no query here attends to: kernels give them no gradient, not
    even 0.
    """
    start = rank * len(query)
    end = start + len(query)
    first = int(ragged.starts[ragged.starts <= start].amax())
    here = replace(
        ragged,
        starts=ragged.starts.clamp(start, end) - start,
        key_starts=ragged.starts.clamp(first, end) - first,
    )
    return kernel(query, key[first:end], value[first:end], here)


def padding(tokens: int, ranks: int) -> int:
    """Tokens that are added to a row, so that its shares are equal."""
    return -tokens % ranks


def share_of(row: AnyRow, rank: int, ranks: int) -> AnyRow:
    """The share of one of the ranks, on the row's device.

    Its input and position ids are those of its tokens. ``starts`` and ``longest`` stay those of the
    whole row; its padding is one more sequence. ``rows`` count from the share's start.
    """
    total = row.input_ids.shape[1]
    added = padding(total, ranks)
    size = (total + added) // ranks
    start, end = rank * size, (rank + 1) * size
    if added:
        ids, at = row.input_ids, torch.arange(added, device=row.input_ids.device)
        row = replace(
            row,
            input_ids=torch.cat([ids, ids.new_zeros(1, added)], 1),
            position_ids=torch.cat([row.position_ids, at[None]], 1),
            starts=torch.cat([row.starts, row.starts.new_tensor([total + added])]),
            longest=max(row.longest, added),
        )
    row = replace(
        row, input_ids=row.input_ids[:, start:end], position_ids=row.position_ids[:, start:end]
    )
    if not isinstance(row, Packed):
        return row
    first, last = torch.searchsorted(row.rows, torch.tensor([start, end])).tolist()
    own = slice(first, last)
    experts = row.experts
    if experts is not None:  # of padding none was chosen
        experts = torch.nn.functional.pad(experts, (0, 0, 0, 0, 0, added), value=-1)[start:end]
    return replace(
        row, rows=row.rows[own] - start, tokens=_tokens(row.tokens, own), experts=experts
    )


def _tokens(tokens: Tokens, own: slice) -> Tokens:
    """The tokens of these rows with their teachers' states; their responses may have further."""
    states = []
    for one in tokens.teacher_states:
        start, stop = max(one.rows.start, own.start), min(one.rows.stop, own.stop)
        if start < stop:
            part = one.states[start - one.start : stop - one.start]
            states.append(TeacherStates(one.teacher, start - own.start, part))
    return replace(tokens.part(own), teacher_states=tuple(states), of=len(tokens))


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
        """This rank's share of a row: see ``share_of``."""
        return share_of(row, self.rank, self.size)

    def gather(self, shares: torch.Tensor, tokens: int) -> torch.Tensor:
        """The values of all ``tokens`` of a row, from those of this rank's share; a collective."""
        return all_gather(shares, self.group)[:tokens]

    def sum(self, tensor: torch.Tensor) -> None:
        """Sums the tensor over the ranks, in place; a collective."""
        dist.all_reduce(tensor, group=self.group)
