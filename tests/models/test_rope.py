"""Positions of a model in an engine, and which rotary factors it takes: as vLLM's source says."""

from __future__ import annotations

from typing import Any

import pytest

from async_opd.config.sections.engine import EngineConfig
from async_opd.models.rope import Positions, max_model_len

ROPE = {"rope_type": "longrope", "original_max_position_embeddings": 4096}


@pytest.mark.parametrize(
    ("config", "given", "longest", "long"),
    [
        pytest.param({"rope_parameters": ROPE}, None, 131072, True, id="only the scaling says it"),
        pytest.param({"rope_scaling": ROPE}, 4096, 4096, False, id="the old name"),
        pytest.param({"rope_parameters": ROPE}, 4097, 4097, True, id="one more"),
        pytest.param({"rope_scaling": {"type": "su"}, "model_type": "phi3"}, None, 4096, False),
        pytest.param({"rope_scaling": {"type": "yarn"}, "model_type": "phi3"}, 9000, 9000, True),
        pytest.param({"rope_parameters": ROPE, "model_type": "phimoe"}, None, 4096, False),
        pytest.param(
            {"rope_parameters": ROPE, "original_max_position_embeddings": 8192}, None, 8192, False
        ),
        pytest.param({"text_config": {"rope_parameters": ROPE}}, 4096, 4096, False, id="inner"),
    ],
)
def test_longrope_takes_the_long_factors_beyond_the_original_positions(
    config: dict[str, Any], given: int | None, longest: int, long: bool
) -> None:
    positions = Positions.of({"max_position_embeddings": 131072, **config}, given)
    assert (positions.kind, positions.longest) == ("longrope", longest)
    assert positions.long_factors is long


def test_a_model_without_scaling_has_its_positions_or_what_is_given() -> None:
    assert Positions.of({"max_position_embeddings": 128}, None).longest == 128
    assert Positions.of({"max_position_embeddings": 128}, 64).longest == 64
    assert Positions.of({}, None).longest is None


def test_the_magnitude_is_the_named_one_or_follows_from_the_positions() -> None:
    positions = Positions.of({"max_position_embeddings": 16384, "rope_parameters": ROPE}, 4096)
    assert positions.magnitude({}) == pytest.approx((1 + 2 / 12) ** 0.5)  # log 4 / log 4096
    assert positions.magnitude({"short_mscale": 1.5, "long_mscale": 2.0}) == 1.5


def test_the_last_word_on_an_engines_length_is_that_of_its_extra_arguments() -> None:
    assert max_model_len(EngineConfig(max_model_len=64, extra={"max_model_len": 32})) == 32
    assert max_model_len(EngineConfig(max_model_len=64)) == 64
    assert max_model_len(EngineConfig(extra={"max_model_len": -1})) is None
