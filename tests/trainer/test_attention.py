"""Attention of packed rows: each sequence by itself, as the model's eager definition has it."""

from __future__ import annotations

import asyncio
import contextvars
import sys
import threading
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from async_opd.core.errors import StageError
from tests.properties import examples
from tests.trainer import attention, families
from tests.trainer.models import random_sample, tiny_model
from trainer.batches.packing import Packed, pack
from trainer.layers import recompute_activations
from trainer.losses import ForwardKL, Objective, OnTopK
from trainer.student.attention import (
    FLASH,
    SEQUENCES,
    VARLEN,
    attend,
    register,
    register_flex,
    register_kernel,
)
from trainer.student.loading import RECOMPILE_LIMIT, refuse_eager_flex
from trainer.student.loss_module import StudentLoss
from trainer.work_thread import WorkThread

FAMILIES: dict[str, Callable[[], Any]] = {
    "Qwen3": tiny_model,
    "windows": lambda: families.mistral(window=3),
    "one window in two layers": families.gemma3,
    "wider heads without a window": families.gemma4,
    "latent attention": families.deepseek,
    "experts": families.mixtral,
}
SIZES = [7, 1, 9, 3]


@pytest.fixture(autouse=True)
def functions_of_a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Both packages' functions for a CPU, with their signatures."""
    register()
    package = SimpleNamespace(flash_attn_varlen_func=attention.flash_attn_varlen_func)
    monkeypatch.setitem(sys.modules, "flash_attn", package)
    monkeypatch.setattr("torch.nn.attention.varlen.varlen_attn", attention.varlen_attn)


def packed(sizes: list[int] = SIZES) -> Packed:
    return pack([random_sample(i, size, k=6) for i, size in enumerate(sizes)])


def loss_of(model: Any, implementation: str, row: Packed) -> tuple[float, list[torch.Tensor]]:
    """The loss of a row under the attention implementation, and its gradients."""
    model.set_attn_implementation(implementation)
    model.zero_grad()
    student = StudentLoss(model, Objective(OnTopK(ForwardKL(), "ignore", None)), {})
    loss, _ = student(row)
    loss.backward()
    return loss.item(), [p.grad.clone() for p in model.parameters() if p.grad is not None]


CASES = [(name, kind) for kind in (VARLEN, FLASH, SEQUENCES) for name in FAMILIES]
CAPPED = [("soft cap", kind) for kind in (FLASH, SEQUENCES)]


@pytest.mark.parametrize(("name", "kind"), [*CASES, *CAPPED])
def test_ragged_rows_have_the_loss_and_gradients_of_eager_attention(name: str, kind: str) -> None:
    model = (FAMILIES | {"soft cap": families.gemma2})[name]().eval()
    (ours, gradients), (theirs, expected) = (loss_of(model, n, packed()) for n in (kind, "eager"))
    assert ours == pytest.approx(theirs, rel=1e-5)
    one, other = (torch.cat([t.flatten() for t in all_]) for all_ in (gradients, expected))
    assert (one - other).norm() < 1e-5 * other.norm()


def test_a_window_that_is_left_out_changes_the_loss() -> None:
    """The test before finds windows: its sequences are longer."""
    model = families.mistral(window=3).eval()
    windowed, _ = loss_of(model, VARLEN, packed())
    register_kernel(
        "packed_test",
        lambda q, k, v, ragged: attention.reference(q, k, v, replace(ragged, window=None)),
    )
    assert abs(loss_of(model, "packed_test", packed())[0] - windowed) > 1e-3


def test_lengths_reach_recomputed_layers() -> None:
    model = tiny_model().eval()
    _, expected = loss_of(model, VARLEN, packed())
    recompute_activations(model)
    _, found = loss_of(model, VARLEN, packed())
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


def test_lengths_are_found_by_packing_and_not_by_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    """transformers' flash attention looks for them in every layer, with synchronizations."""
    seen: list[tuple[torch.Tensor, int]] = []

    def spy(
        query: Any, key: Any, value: Any, starts: Any, _: Any, longest: int, *rest: Any, **o: Any
    ) -> Any:
        seen.append((starts, longest))
        return attention.varlen_attn(query, key, value, starts, starts, longest, longest, **o)

    monkeypatch.setattr("torch.nn.attention.varlen.varlen_attn", spy)
    row = packed()
    loss_of(tiny_model().eval(), VARLEN, row)
    assert len(seen) == 2
    assert all(starts is row.starts and longest == row.longest for starts, longest in seen)


def test_no_mask_of_a_row_is_made(monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(*_: Any, **__: Any) -> None:
        raise AssertionError("a mask was made")

    for name in ("sdpa_mask", "eager_mask", "flex_attention_mask"):
        monkeypatch.setattr(f"transformers.masking_utils.{name}", refused)
    loss_of(families.mistral(window=3).eval(), VARLEN, packed())


def test_no_packed_sequences_are_looked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """transformers' search waits for the device, in each micro-batch."""

    def refused(*_: Any) -> None:
        raise AssertionError("the device is waited for")

    monkeypatch.setattr("transformers.masking_utils.find_packed_sequence_indices", refused)
    loss_of(tiny_model().eval(), VARLEN, packed())


@examples(25)
@given(
    lengths=st.lists(st.integers(1, 9), min_size=1, max_size=5),
    window=st.none() | st.integers(1, 10),
    heads=st.sampled_from([(1, 1), (4, 2), (6, 1)]),
    seed=st.integers(0, 99),
)
def test_each_sequence_is_attended_as_if_alone(
    lengths: list[int], window: int | None, heads: tuple[int, int], seed: int
) -> None:
    """Against torch's scaled_dot_product_attention with transformers' own mask of each sequence."""
    from transformers.masking_utils import (
        causal_mask_function,
        sdpa_mask,
        sliding_window_causal_mask_function,
    )

    torch.manual_seed(seed)
    total = sum(lengths)
    query, key, value = (torch.randn(1, h, total, 8) for h in (heads[0], heads[1], heads[1]))
    starts = torch.tensor([0, *torch.tensor(lengths).cumsum(0)], dtype=torch.int32)
    options: dict[str, Any] = {"cu_seq_lens_q": starts, "max_length_q": max(lengths)}
    module = torch.nn.Module()
    found, _ = attend(
        attention.reference, module, query, key, value, None, sliding_window=window, **options
    )
    function = (
        causal_mask_function if window is None else sliding_window_causal_mask_function(window)
    )
    for start, length in zip(starts.tolist(), lengths, strict=False):
        part = slice(start, start + length)
        mask = sdpa_mask(1, length, length, mask_function=function, allow_is_causal_skip=False)
        expected = torch.nn.functional.scaled_dot_product_attention(
            query[:, :, part], key[:, :, part], value[:, :, part], mask, enable_gqa=True
        )
        assert torch.allclose(found[:, part], expected.transpose(1, 2), atol=1e-5)


@pytest.mark.parametrize(
    "asked",
    [
        {"s_aux": torch.zeros(1)},
        {"position_bias": torch.zeros(1)},
        {"dropout": 0.1},
        {"is_causal": False},
        {"cu_seq_lens_q": None},
        {"indices": torch.zeros(1)},
    ],
)
def test_what_a_kernel_does_not_compute_is_refused(asked: dict[str, Any]) -> None:
    tensors = [torch.zeros(1, 1, 2, 8) for _ in range(3)]
    given = {"cu_seq_lens_q": torch.tensor([0, 2]), "max_length_q": 2, **asked}
    name = "lengths" if asked == {"cu_seq_lens_q": None} else next(iter(asked))
    with pytest.raises(StageError, match=name):
        attend(attention.reference, torch.nn.Module(), *tensors, None, **given)


def test_torchs_varlen_refuses_a_soft_cap() -> None:
    with pytest.raises(StageError, match="soft cap"):
        loss_of(families.gemma2().eval(), VARLEN, packed())


def test_autocast_decides_the_kernels_precision() -> None:
    """Norms of queries and keys give float32 under autocast; the kernel takes 16 bits only."""
    seen = set()

    def spy(query: Any, key: Any, value: Any, ragged: Any) -> Any:
        seen.update({query.dtype, key.dtype, value.dtype})
        return attention.reference(query, key, value, ragged)

    register_kernel("packed_test", spy)
    with torch.autocast("cpu", torch.bfloat16):
        loss_of(tiny_model().eval(), "packed_test", packed())
    assert seen == {torch.bfloat16}


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@pytest.mark.parametrize("name", ["Qwen3", "windows", "Gemma 2"])
def test_flex_attention_has_the_eager_logits(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its forward pass, not compiled: it has no backward pass on a CPU."""
    from torch.nn.attention import flex_attention as flex
    from transformers import masking_utils
    from transformers.integrations import flex_attention as theirs

    blocks = flex.create_block_mask

    def uncompiled(*given: Any, _compile: bool = False, **options: Any) -> Any:
        return blocks(*given, **options)

    def called(*given: Any, training: bool = False, **options: Any) -> Any:
        return flex.flex_attention(*given, **options)

    monkeypatch.setattr(masking_utils, "create_block_mask", uncompiled)
    monkeypatch.setattr(theirs, "compile_friendly_flex_attention", called)
    model = (families.gemma2 if name == "Gemma 2" else FAMILIES[name])().eval()
    row = packed()
    logits = []
    for implementation in ("flex_attention", "eager"):
        model.set_attn_implementation(implementation)
        with torch.no_grad():
            out = model(input_ids=row.input_ids, position_ids=row.position_ids, use_cache=False)
        logits.append(out.logits)
    assert torch.allclose(*logits, atol=1e-4)


def test_flex_attention_has_one_kernel_for_rows_of_any_length(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """torch's other one, for less than 128 tokens, fails where queries share keys."""
    from transformers import AttentionInterface
    from transformers.integrations import flex_attention as theirs

    seen: list[Any] = []

    def called(query: Any, *_: Any, kernel_options: Any = None, **__: Any) -> Any:
        seen.append(kernel_options)
        return query

    monkeypatch.setattr(theirs, "compile_friendly_flex_attention", called)
    registered: dict[str, Any] = {}
    monkeypatch.setattr(AttentionInterface, "register", registered.__setitem__)
    register_flex()
    forward = registered["flex_attention"]
    query = torch.zeros(1, 2, 5, 16)
    forward(torch.nn.Module(), query, query, query, None)
    assert seen == [{"FORCE_USE_FLEX_ATTENTION": True}]


def keep_limits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Dynamo's limits are what they were, after the test."""
    import torch._dynamo.config as limits

    entries: Any = limits._config
    for name in ("recompile_limit", "fail_on_recompile_limit_hit"):
        monkeypatch.setattr(entries[name], "default", entries[name].default)


async def test_eager_flex_attention_is_refused_everywhere(monkeypatch: pytest.MonkeyPatch) -> None:
    """The student is built by one task, trained by another, on a GPU on a thread of autograd's."""
    import torch._dynamo.config as limits

    keep_limits(monkeypatch)

    async def build() -> None:
        refuse_eager_flex()

    def seen() -> None:
        found.append((limits.recompile_limit, limits.fail_on_recompile_limit_hit))

    found: list[tuple[int, bool]] = []
    work = WorkThread("train")

    async def on_the_thread() -> None:
        await work.run(seen)

    for call in (build, on_the_thread):
        await asyncio.create_task(call(), context=contextvars.Context())
    bare = threading.Thread(target=seen)
    bare.start()
    bare.join()
    assert found == [(RECOMPILE_LIMIT, True)] * 2


@pytest.mark.long
def test_flex_attention_is_compiled_a_few_times(monkeypatch: pytest.MonkeyPatch) -> None:
    """Compiled for a CPU, forward: torch would compute T² scores eagerly after too many."""
    from torch._dynamo.utils import counters

    torch.compiler.reset()
    counters.clear()
    keep_limits(monkeypatch)
    refuse_eager_flex()
    model = families.mistral(window=64).eval()
    for seed in range(8):
        row = packed([60 + 7 * seed, 30 + 31 * seed % 90, 90])
        logits = []
        for implementation in ("flex_attention", "eager"):
            model.set_attn_implementation(implementation)
            with torch.no_grad():
                out = model(input_ids=row.input_ids, position_ids=row.position_ids, use_cache=False)
            logits.append(out.logits)
        assert torch.allclose(*logits, atol=1e-4)
    assert counters["stats"]["unique_graphs"] <= 4
