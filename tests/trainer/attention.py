"""Attention of ragged rows by its definition, one sequence after the other, for any device."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import torch

from trainer.student.attention import Ragged


def reference(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, ragged: Ragged
) -> torch.Tensor:
    """A kernel: softmax over the keys of the same sequence, before the query, in its window."""
    groups = query.shape[1] // key.shape[1]
    key, value = (t.repeat_interleave(groups, dim=1) for t in (key, value))
    scale = query.shape[-1] ** -0.5 if ragged.scale is None else ragged.scale
    out = torch.empty_like(query)
    starts = ragged.starts.tolist()
    assert ragged.longest == max(b - a for a, b in itertools.pairwise(starts))
    for start, end in itertools.pairwise(starts):
        part = slice(start, end)
        scores = scale * torch.einsum("qhd,khd->hqk", query[part].float(), key[part].float())
        if ragged.soft_cap is not None:
            scores = ragged.soft_cap * torch.tanh(scores / ragged.soft_cap)
        distance = torch.arange(end - start)[:, None] - torch.arange(end - start)
        seen = distance >= 0
        if ragged.window is not None:
            seen &= distance <= ragged.window
        weights = scores.masked_fill(~seen, -torch.inf).softmax(-1)
        out[part] = torch.einsum("hqk,khd->qhd", weights, value[part].float()).to(out.dtype)
    return out


def double_scale(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, ragged: Ragged
) -> torch.Tensor:
    """A kernel with a fault: its scores are twice those of the definition."""
    scale = query.shape[-1] ** -0.5 if ragged.scale is None else ragged.scale
    return reference(query, key, value, replace(ragged, scale=2 * scale))


def varlen_attn(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    cu_seq_q: torch.Tensor,
    cu_seq_k: torch.Tensor | None,
    max_q: int,
    max_k: int,
    *,
    return_aux: Any = None,
    scale: float | None = None,
    window_size: tuple[int, int] = (-1, -1),
    enable_gqa: bool = False,
    seqused_k: torch.Tensor | None = None,
    block_table: torch.Tensor | None = None,
    num_splits: int | None = None,
) -> torch.Tensor:
    """torch's interface, ``torch.nn.attention.varlen.varlen_attn``, for causal windows.

    ``window_size`` (w, 0): keys from w before the query on, and the query's own; -1 for all.
    """
    assert cu_seq_k is cu_seq_q
    assert max_k == max_q
    assert window_size[1] == 0
    assert enable_gqa or query.shape[1] == key.shape[1]
    assert query.dtype == key.dtype == value.dtype
    assert query.shape[-1] == key.shape[-1] == value.shape[-1]
    left = None if window_size[0] < 0 else window_size[0]
    return reference(query, key, value, Ragged(cu_seq_q, max_q, scale, left, None))


def flash_attn_varlen_func(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Any = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    block_table: Any = None,
) -> torch.Tensor:
    """The interface of flash-attn 2.6 to 2.8; ``softcap`` 0 is none."""
    assert causal
    assert dropout_p == 0
    lengths = (cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k)
    window = (window_size[0], 0)
    if not softcap:
        options = {"scale": softmax_scale, "window_size": window, "enable_gqa": True}
        return varlen_attn(q, k, v, *lengths, **options)
    left = None if window[0] < 0 else window[0]
    return reference(q, k, v, Ragged(cu_seqlens_q, max_seqlen_q, softmax_scale, left, softcap))
