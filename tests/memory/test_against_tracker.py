"""The planner against torch's memory tracker, term by term; ``benchmarks.memory`` has more.

``tests/benchmarks/test_runs.py`` runs it, with a step on real tensors.
"""

from __future__ import annotations

from typing import Any

import pytest

from async_opd.config.sections.train import TrainConfig
from benchmarks.memory import mixture, small
from benchmarks.memory_step import Case, fake_ranks, gloo_ratios, ratios

CLOSE = 0.1


def train(ranks: int, dtype: str, kind: str, **settings: Any) -> TrainConfig:
    given = {"ranks": ranks, "dtype": dtype, "gradient_checkpointing": kind}
    return TrainConfig.model_validate({**given, **settings})


def two_layers(family: str, **settings: Any) -> Any:
    return small(family, num_hidden_layers=2, **settings)


def experts() -> Any:
    config = mixture(2)
    config.hidden_size, config.vocab_size, config.num_experts = 512, 4096, 16
    return config


def off(found: dict[str, float]) -> dict[str, float]:
    assert {"backward", "peak"} <= found.keys()
    return {term: ratio for term, ratio in found.items() if abs(ratio - 1) > CLOSE}


@pytest.mark.parametrize(
    ("config", "settings", "ragged"),
    [
        (two_layers("Qwen3"), train(1, "float32", "none"), False),
        (two_layers("Qwen3"), train(8, "bfloat16", "full"), True),
        (
            two_layers("Qwen3", tie_word_embeddings=True, vocab_size=32768),
            train(1, "float32", "full"),
            False,
        ),
    ],
    ids=["kept", "8 ranks", "a tied head that is most of the student"],
)
def test_every_term_is_within_a_tenth(config: Any, settings: TrainConfig, ragged: bool) -> None:
    with fake_ranks(settings.ranks) as mesh:
        assert off(ratios(Case("test", config, settings, 1024, 256, ragged), mesh)) == {}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("config", "settings", "ragged"),
    [
        (two_layers("Llama", tie_word_embeddings=True), train(1, "bfloat16", "full"), True),
        (two_layers("Qwen2"), train(1, "float32", "selective"), False),
        (experts(), train(8, "bfloat16", "full"), True),
    ],
    ids=["tied bfloat16", "selective", "experts on 8 ranks"],
)
def test_so_it_is_for_other_families_and_kinds_of_recomputation(
    config: Any, settings: TrainConfig, ragged: bool
) -> None:
    test_every_term_is_within_a_tenth(config, settings, ragged)


@pytest.mark.slow
@pytest.mark.parametrize("when", ["step", "micro_batch"])
def test_a_step_of_two_ranks_over_gloo_is_within_a_tenth(when: str) -> None:
    settings = train(2, "float32", "full", reduce_gradients=when)
    assert off(gloo_ratios(Case("test", two_layers("Qwen3"), settings))) == {}
