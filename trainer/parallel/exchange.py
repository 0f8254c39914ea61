"""Attention of a row whose tokens lie on several ranks, by the kernels of one rank.

    each rank: all heads of its tokens ──all-to-all──► its heads of all tokens ──kernel──┐
                                                                                         │
    each rank: all heads of its tokens ◄──────────────────all-to-all─────────────────────┘

This is DeepSpeed-Ulysses (arXiv:2309.14509). Keys and values of fewer heads than ranks are sent to
several ranks. Where the queries' heads do not divide by the ranks, every rank gathers keys and
values of all tokens, and computes its own tokens' queries; the last rank has the most to compute.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch.autograd.function import once_differentiable

from trainer.student.attention import Kernel, Ragged


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
    the device once, to cut keys that no query here sees: kernels give them no gradient, not even 0.
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
