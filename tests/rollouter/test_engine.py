"""The engine's final output becomes a rollout; its seats for held rows, and how it rounds."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest

from async_opd.core.errors import RolloutFault
from async_opd.core.samples import Rollout, VersionSpan
from tests.conftest import make_prompt


def output(tokens: list[int], top_k: int, finish: str = "stop", versions: Any = None) -> Any:
    """Flat log-probabilities as vLLM gives them: the sampled token's, then tokens 0, 1, …"""
    entries = [(t, -float(t)) for token in tokens for t in (token, *range(top_k))]
    flat = SimpleNamespace(token_ids=[t for t, _ in entries], logprobs=[p for _, p in entries])
    whole = [SimpleNamespace(version="0", start=0, end=len(tokens))] if tokens else None
    return SimpleNamespace(
        token_ids=tokens,
        logprobs=flat,
        finish_reason=finish,
        weight_versions=versions or whole,
        routed_experts=None,
    )


def rollout(found: Any, top_k: int) -> Rollout:
    from rollouter.engine import rollout_of  # imports vLLM

    return rollout_of("p/0", make_prompt("p", "sort"), found, top_k)


def test_the_sampled_tokens_and_the_best_are_distinguished() -> None:
    found = rollout(output([0, 5, 1], top_k=2), 2)
    assert found.response_ids.tolist() == [0, 5, 1]
    assert found.rollout_logprobs.tolist() == [0, -5, -1]
    assert found.topk_ids.tolist() == [[0, 1]] * 3
    assert (found.response_ids.dtype, found.topk_ids.dtype) == (np.int32, np.int32)


def test_without_a_top_k_a_rollout_has_none_and_version_spans_are_the_engines() -> None:
    found = rollout(output([4, 5], top_k=0, finish="length"), 0)
    assert (found.topk_ids, found.finish_reason) == (None, "length")
    assert found.rollout_logprobs.tolist() == [-4, -5]
    spans = [SimpleNamespace(version=v, start=s, end=e) for v, s, e in (("3", 0, 1), ("4", 1, 2))]
    found = rollout(output([7, 8], top_k=0, versions=spans), 0)
    assert found.version_spans == (VersionSpan(3, 0, 1), VersionSpan(4, 1, 2))


def test_experts_are_the_engines_and_an_empty_response_is_a_rollout() -> None:
    found = output([7, 8], top_k=0)
    tokens = len(make_prompt("p", "sort").token_ids) + 2
    found.routed_experts = np.ones((tokens - 1, 3, 2), np.uint8)
    assert rollout(found, 0).routed_experts is found.routed_experts
    found = rollout(output([], top_k=2), 2)
    assert (len(found.response_ids), found.version_spans) == (0, ())


def test_a_token_that_the_model_does_not_have_is_refused_before_the_engine() -> None:
    from rollouter.engine import refuse_foreign_tokens

    prompt = make_prompt("p", "sort")
    highest = int(prompt.token_ids.max())
    refuse_foreign_tokens(prompt, "p/0", highest + 1)
    with pytest.raises(RolloutFault, match=f"p/0: .* to {highest}, the model has {highest}"):
        refuse_foreign_tokens(prompt, "p/0", highest)


@pytest.mark.parametrize(
    ("given", "seats"),
    [
        ({"max_num_seqs": 64}, 70),
        ({"max_num_seqs": 1}, 1),
        ({"max_num_seqs": 64, "max_num_batched_tokens": 66}, 66),
        ({"max_num_seqs": 64, "max_num_batched_tokens": 8192}, 70),
    ],
)
def test_held_rows_have_seats_where_vllm_takes_them(given: dict[str, Any], seats: int) -> None:
    """vLLM refuses more seats than tokens of a step; one seat keeps a response's batch its own."""
    from rollouter.engine import with_seats

    assert with_seats(given)["max_num_seqs"] == seats


@pytest.mark.parametrize(("cuda", "rounding"), [(False, 2.0**-24), (True, 2.0**-11)])
def test_a_float32_engine_rounds_to_tf32_on_a_gpu(
    cuda: bool, rounding: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    import torch

    from rollouter import engine as engine_module

    engine = SimpleNamespace(quant_config=None, model_config=SimpleNamespace(dtype=torch.float32))
    platform = SimpleNamespace(is_cuda=lambda: cuda)
    monkeypatch.setattr(engine_module, "current_platform", platform)
    assert engine_module.rounding_of(cast(Any, engine)) == rounding
