"""Defaults that follow from the models: lengths of engines, what a rank recomputes."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from async_opd.config.run_config import RunConfig
from async_opd.config.sections.teachers import EngineTeacher
from async_opd.memory.defaults import NEAR_FULL, with_lengths, with_recomputation
from async_opd.memory.pools import GIB, Machine, cached_numbers, step_of
from async_opd.memory.step import peak
from async_opd.models.model_size import ModelSize

SIZES = {
    "1.7": ModelSize(1_720_000_000, 0, 2048, 6144, 28, 151_936, 151_936, 2048, 1024, 16),
    "8": ModelSize(8_190_000_000, 0, 4096, 12288, 36, 151_936, 303_872, 4096, 1024, 32),
}
WITHIN = {"max_prompt_tokens": 500}


def config(model: str, data: Any = None, **sections: Any) -> RunConfig:
    return RunConfig.model_validate(
        {
            "student": {"model": model},
            "teachers": {"a": {"model": model}},
            "data": {"train": "prompts.jsonl", **(data or {})},
            "rollout": {"max_tokens": 100},
            **sections,
        }
    )


def model(folder: Path, **settings: Any) -> str:
    (folder / "config.json").write_text(json.dumps({"max_position_embeddings": 4096, **settings}))
    return str(folder)


def lengths(made: RunConfig) -> list[int | None]:
    teacher = made.teachers["a"]
    assert isinstance(teacher, EngineTeacher)
    return [made.rollout.engine.max_model_len, teacher.engine.max_model_len]


def test_engines_hold_prompt_longest_response_and_one_token(tmp_path: Path) -> None:
    made = config(model(tmp_path), WITHIN, eval={"max_tokens": 200})
    assert lengths(with_lengths(made)) == [701, 701]


def test_without_a_bound_of_prompts_models_keep_their_limit(tmp_path: Path) -> None:
    assert lengths(with_lengths(config(model(tmp_path)))) == [None, None]


def test_a_length_that_is_configured_stays(tmp_path: Path) -> None:
    rollout = {"max_tokens": 100, "engine": {"max_model_len": 650}}
    made = config(model(tmp_path), WITHIN, rollout=rollout)
    assert lengths(with_lengths(made)) == [650, 601]


def test_no_length_is_beyond_the_models_positions(tmp_path: Path) -> None:
    made = config(model(tmp_path, max_position_embeddings=601), WITHIN)
    assert lengths(with_lengths(made)) == [None, None]


def test_a_model_whose_positions_depend_on_the_length_keeps_its_limit(tmp_path: Path) -> None:
    scaled = {"rope_type": "longrope", "original_max_position_embeddings": 2048}
    made = config(model(tmp_path, rope_scaling=scaled), WITHIN)
    assert lengths(with_lengths(made)) == [None, None]


@pytest.mark.parametrize(
    "own",
    [{"own_template": True}, {"system_prompt": "be brief"}, {"prompt_template": "Q: {prompt}"}],
)
def test_a_teacher_with_prompts_of_its_own_keeps_its_limit(tmp_path: Path, own: Any) -> None:
    path = model(tmp_path)
    made = config(path, WITHIN, teachers={"a": {"model": path, **own}})
    assert lengths(with_lengths(made)) == [601, None]


@pytest.mark.parametrize(
    ("student", "ranks", "kind"),
    [("1.7", 8, "none"), ("1.7", 4, "none"), ("8", 8, "full")],
)
def test_a_rank_recomputes_the_least_that_fits(student: str, ranks: int, kind: str) -> None:
    made = config(student, train={"ranks": ranks}, rollout={"max_tokens": 8192})
    machine = Machine("cuda", 80 * GIB, SIZES.__getitem__)
    chosen = with_recomputation(made, machine, GIB)
    assert chosen.train.gradient_checkpointing == kind
    assert sum(peak(step_of(chosen, machine)).values()) + GIB <= NEAR_FULL * 80 * GIB


@pytest.mark.parametrize("gib", [20, 30, 40, 60, 80, 140])
def test_less_recomputation_would_not_fit(gib: int) -> None:
    made = config("1.7", train={"ranks": 8}, rollout={"max_tokens": 8192})
    machine = Machine("cuda", gib * GIB, SIZES.__getitem__)
    chosen = with_recomputation(made, machine, GIB).train.gradient_checkpointing
    kinds = ["none", "selective", "full"]
    for less in kinds[: kinds.index(chosen)]:
        step = replace(step_of(made, machine), recompute=less)  # type: ignore[arg-type]
        assert sum(peak(step).values()) + GIB > NEAR_FULL * gib * GIB


def test_auto_stays_where_the_memory_is_not_known_or_nothing_can_be_recomputed() -> None:
    made = config("8")
    fixed = SIZES | {"8": replace(SIZES["8"], recomputable=False)}
    for machine in (
        Machine("cuda", None, SIZES.__getitem__),
        Machine("cpu", 80 * GIB, SIZES.__getitem__),
        Machine("cuda", 80 * GIB, fixed.__getitem__),
    ):
        assert with_recomputation(made, machine, GIB) == made


def test_an_engine_keeps_of_a_token_what_each_of_its_layers_keeps() -> None:
    latent_too = replace(SIZES["8"], caches=((8, 256), (1, 576)))
    assert cached_numbers(latent_too, 1) == [2048, 576]
    assert cached_numbers(latent_too, 4) == [512, 576]
    assert cached_numbers(SIZES["8"], 2) == [1024] * 36
