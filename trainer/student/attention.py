"""Attention of packed rows, each sequence by itself: no mask of a row is made.

    Packed.starts, longest ──keyword arguments of the decoder──► every layer ──► ragged kernel

transformers finds these functions by name, as it finds ``sdpa``. A request of a layer beyond
the kernel's abilities is an error, never ignored.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from async_opd.core.errors import StageError

if TYPE_CHECKING:
    from trainer.batches.packing import Row

VARLEN, FLASH, SEQUENCES = "packed_varlen", "packed_fa", "packed_sequences"
"""Names in transformers' registry. One with "flash" in it would be taken for transformers' own."""

HARMLESS = {
    "position_ids",
    "position_embeddings",
    "cache_position",
    "use_cache",
    "past_key_values",
    "return_dict",
    "output_attentions",
    "output_hidden_states",
    "output_router_logits",
    "logits_to_keep",
    "is_causal",
    "cu_seq_lens_k",
    "max_length_k",
}
"""Arguments that models pass on and that change no result here; a cache is never used."""


@dataclass(frozen=True)
class Ragged:
    """A kernel's inputs of a packed row and its layer, beside queries, keys and values.

    ``starts`` and ``longest`` are those of ``packing.Row``. ``scale`` of scores: None is 1 over the
    root of the heads' width. ``window``: keys that a query attends to before itself; None for all.
    ``soft_cap`` None: scores are not capped. ``key_starts`` are the keys' where a sequence has more
    keys than queries: its queries are then its last tokens.
    """

    starts: torch.Tensor
    longest: int
    scale: float | None
    window: int | None
    soft_cap: float | None
    key_starts: torch.Tensor | None = None

    @property
    def lengths(self) -> tuple[torch.Tensor, torch.Tensor, int, int]:
        """Starts of queries and keys, and a bound of each one's longest sequence."""
        keys = self.starts if self.key_starts is None else self.key_starts
        return self.starts, keys, self.longest, self.longest


Kernel = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, Ragged], torch.Tensor]
"""Causal attention of queries, keys and values [T, heads, D] of the same width, [T, heads, D]. Keys
and values may have fewer heads, a divisor of the queries'."""


def register() -> None:
    """Makes all functions known to transformers; a second call changes nothing."""
    for name, kernel in ((VARLEN, varlen), (FLASH, flash_attn), (SEQUENCES, by_sequence)):
        register_kernel(name, kernel)


def register_kernel(name: str, kernel: Kernel) -> None:
    """Makes a kernel an attention implementation of transformers.

    No function of a mask is registered with it: transformers then makes none, and does not look
    for packed sequences, for which it would wait for the device in each micro-batch.
    """
    from transformers import AttentionInterface

    AttentionInterface.register(name, partial(attend, kernel))


def register_flex() -> None:
    """Makes transformers' flex attention use one kernel for rows of any length.

    torch has another one for rows of less than 128 tokens, which it cannot compile for some of
    them where queries share keys.
    """
    from transformers import AttentionInterface
    from transformers.integrations.flex_attention import flex_attention_forward

    one_kernel = {"FORCE_USE_FLEX_ATTENTION": True}
    forward = partial(flex_attention_forward, kernel_options=one_kernel)
    AttentionInterface.register("flex_attention", forward)


def row_lengths(implementation: str | None, row: Row) -> dict[str, Any]:
    """Keyword arguments of the decoder by which each layer knows where sequences begin."""
    if not (implementation or "").startswith("packed_"):
        return {}
    return {
        "cu_seq_lens_q": row.starts,
        "cu_seq_lens_k": row.starts,
        "max_length_q": row.longest,
        "max_length_k": row.longest,
    }


def unknown_arguments(arguments: Mapping[str, Any]) -> set[str]:
    """Arguments of transformers' attention interface that no kernel here computes with."""
    given = {name for name, value in arguments.items() if value is not None and value is not False}
    return given - HARMLESS


def attend(
    kernel: Kernel,
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    softcap: float | None = None,
    cu_seq_lens_q: torch.Tensor | None = None,
    max_length_q: int | None = None,
    **others: Any,
) -> tuple[torch.Tensor, None]:
    """The attention of one layer: of queries, keys and values [1, heads, T, D], [1, T, heads, D].

    StageError for anything that the kernel does not compute.
    """
    causal = others.get("is_causal")
    if causal is None:
        causal = getattr(module, "is_causal", True)
    asked = unknown_arguments(others)
    asked |= {"attention_mask"} if attention_mask is not None else set()
    asked |= {"dropout"} if dropout else set()
    asked |= set() if causal else {"is_causal=False"}
    if cu_seq_lens_q is None or max_length_q is None or asked:
        lost = ", ".join(sorted(asked)) or "no lengths of sequences"
        raise StageError(
            "trainer",
            f"{type(module).__name__} calls its attention with {lost}, which ragged rows of "
            "sequences have no way to compute",
            "set train.attention: flex",
        )
    dtype = value.dtype
    if torch.is_autocast_enabled(query.device.type):
        dtype = torch.get_autocast_dtype(query.device.type)  # norms of queries give float32
    width, value_width = query.shape[-1], value.shape[-1]
    if value_width < width:  # latent attention: kernels take one width, and zeros change nothing
        value = torch.nn.functional.pad(value, (0, width - value_width))
    query, key, value = (tensor[0].transpose(0, 1).to(dtype) for tensor in (query, key, value))
    window = None if sliding_window is None else sliding_window - 1
    out = kernel(query, key, value, Ragged(cu_seq_lens_q, max_length_q, scaling, window, softcap))
    return out[None, ..., :value_width], None


def varlen(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, ragged: Ragged
) -> torch.Tensor:
    """torch's own: flash attention 2 on GPUs, in 16 bits. StageError for a soft cap."""
    from torch.nn.attention.varlen import varlen_attn

    if ragged.soft_cap is not None:
        remedy = "set train.attention: flex, or install flash-attn"
        raise StageError("trainer", "torch's varlen_attn has no soft cap of scores", remedy)
    window = (-1 if ragged.window is None else ragged.window, 0)
    out: Any = varlen_attn(
        query, key, value, *ragged.lengths, scale=ragged.scale, window_size=window, enable_gqa=True
    )
    return out  # type: ignore[no-any-return]


def flash_attn(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, ragged: Ragged
) -> torch.Tensor:
    """The package flash-attn, from 2.6 on."""
    from flash_attn import flash_attn_varlen_func  # type: ignore[import-not-found]

    out: torch.Tensor = flash_attn_varlen_func(
        query,
        key,
        value,
        *ragged.lengths,
        softmax_scale=ragged.scale,
        causal=True,
        window_size=(-1 if ragged.window is None else ragged.window, 0),
        softcap=ragged.soft_cap or 0.0,
    )
    return out


def by_sequence(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, ragged: Ragged
) -> torch.Tensor:
    """torch's sdpa, one sequence after the other, on any device and in any precision.

    A mask is made of a sequence with a window, or with more keys than queries. Soft-capped scores
    are computed as they are written.
    """
    query_starts, key_starts, _, _ = ragged.lengths
    # A slice's gradient would be a tensor of the whole row for each sequence; that of a split is
    # one concatenation.
    queries, keys = query_starts.diff().tolist(), key_starts.diff().tolist()
    given: Any = zip((query, key, value), (queries, keys, keys), strict=True)
    parts = []
    for q, k, v in zip(*(whole.split(lengths) for whole, lengths in given), strict=True):
        if len(q):
            out = _sequence(q.transpose(0, 1), k.transpose(0, 1), v.transpose(0, 1), ragged)
            parts.append(out.transpose(0, 1))
    return torch.cat(parts)


def _sequence(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, ragged: Ragged
) -> torch.Tensor:
    """The attention of one sequence, heads first; its queries are its last tokens."""
    queries, keys = query.shape[1], key.shape[1]
    mask = None
    if ragged.window is not None or ragged.soft_cap is not None or queries < keys:
        at = torch.arange(keys, device=query.device)
        distance = at[keys - queries :, None] - at
        mask = (distance >= 0) & (distance <= (keys if ragged.window is None else ragged.window))
    if ragged.soft_cap is None:
        return torch.nn.functional.scaled_dot_product_attention(
            query[None],
            key[None],
            value[None],
            attn_mask=mask,
            is_causal=mask is None,
            scale=ragged.scale,
            enable_gqa=True,
        )[0]
    assert mask is not None
    key, value = (t.repeat_interleave(len(query) // len(t), dim=0) for t in (key, value))
    scale = query.shape[-1] ** -0.5 if ragged.scale is None else ragged.scale
    scores = ragged.soft_cap * torch.tanh(query @ key.mT * (scale / ragged.soft_cap))
    precise = torch.promote_types(scores.dtype, torch.float32)
    weights = scores.masked_fill(~mask, -torch.inf).softmax(-1, dtype=precise)
    return weights.to(value.dtype) @ value
