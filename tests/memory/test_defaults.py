"""Defaults that follow from the models: lengths of engines, layers of ranks."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from async_opd.config.run_config import RunConfig
from async_opd.config.sections.teachers import EngineTeacher
from async_opd.memory.defaults import (
    NEAR_FULL,
    with_compiled_layers,
    with_lengths,
    with_recomputation,
)
from async_opd.memory.pools import GIB, Machine, cached_numbers, step_of
from async_opd.memory.step import peak
from async_opd.models.engine_args import Device
from async_opd.models.model_size import ModelSize, Tower
from tests.world.config import run_config

SIZES = {
    "1.7": ModelSize(1_720_000_000, 0, 2048, 6144, 28, 151_936, 151_936, 2048, 1024, 16),
    "8": ModelSize(8_190_000_000, 0, 4096, 12288, 36, 151_936, 303_872, 4096, 1024, 32),
}
WITHIN = {"max_prompt_tokens": 500}


def config(model: str, data: Any = None, **sections: Any) -> RunConfig:
    smallest = {
        "student": {"model": model},
        "teachers": {"a": {"model": model}},
        "data": {"train": "prompts.jsonl", **(data or {})},
        "rollout": {"max_tokens": 100},
    }
    return run_config(**{**smallest, **sections})


def model(folder: Path, **settings: Any) -> str:
    (folder / "config.json").write_text(json.dumps({"max_position_embeddings": 4096, **settings}))
    return str(folder)


def lengths(made: RunConfig) -> list[int | None]:
    teacher = made.teachers["a"]
    assert isinstance(teacher, EngineTeacher)
    return [made.rollout.engine.max_model_len, teacher.engine.max_model_len]


LONGROPE = {"rope_scaling": {"rope_type": "longrope", "original_max_position_embeddings": 2048}}
SHORTER = {"rollout": {"max_tokens": 100, "engine": {"max_model_len": 650}}}


@pytest.mark.parametrize(
    ("settings", "data", "sections", "teacher", "found"),
    [
        ({}, WITHIN, {"eval": {"max_tokens": 200}}, {}, [701, 701]),
        ({}, {}, {}, {}, [None, None]),
        ({}, WITHIN, SHORTER, {}, [650, 601]),
        ({"max_position_embeddings": 601}, WITHIN, {}, {}, [None, None]),
        (LONGROPE, WITHIN, {}, {}, [None, None]),
        ({}, WITHIN, {}, {"own_template": True}, [601, None]),
        ({}, WITHIN, {}, {"system_prompt": "be brief"}, [601, None]),
        ({}, WITHIN, {}, {"prompt_template": "Q: {prompt}"}, [601, None]),
    ],
    ids=[
        "prompt, longest response and one token",
        "no bound of prompts",
        "a configured length stays",
        "not beyond the model's positions",
        "positions that depend on the length",
        "a teacher with another template",
        "a teacher with a system prompt",
        "a teacher with a prompt template",
    ],
)
def test_engines_hold_the_tokens_that_their_prompts_and_responses_may_have(
    tmp_path: Path, settings: Any, data: Any, sections: Any, teacher: Any, found: list[int | None]
) -> None:
    path = model(tmp_path, **settings)
    made = config(path, data, teachers={"a": {"model": path, **teacher}}, **sections)
    assert lengths(with_lengths(made)) == found


@pytest.mark.parametrize(
    ("student", "ranks", "kind"), [("1.7", 8, "none"), ("1.7", 4, "none"), ("8", 8, "full")]
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


@pytest.mark.parametrize(
    ("device", "student", "train", "compiled"),
    [
        ("cuda", {}, {}, True),
        ("cuda", {}, {"lora": {}}, True),
        ("cuda", {}, {"ranks": 4, "replicate": 2, "offload": "parameters"}, True),
        ("cpu", {}, {}, False),
        ("cuda", {"experts": 8}, {}, False),
        ("cuda", {"tower": Tower(10, 4, 4, 2, 2, 4)}, {}, False),
        ("cuda", {"recomputable": False}, {}, False),
        ("cuda", {}, {"ranks": 2, "context_parallel": 2}, False),
        ("cuda", {"experts": 8}, {"routing": "replay"}, False),
        ("cpu", {}, {"compile": True}, True),
        ("cuda", {}, {"compile": False}, False),
    ],
)
def test_layers_are_compiled_on_gpus_where_they_were_compared_with_eager_ones(
    device: Device, student: dict[str, Any], train: dict[str, Any], compiled: bool
) -> None:
    machine = Machine(device, None, {"8": replace(SIZES["8"], **student)}.__getitem__)
    made = with_compiled_layers(config("8", train=train), machine)
    assert made.train.compile is compiled


def test_an_engine_keeps_of_a_token_what_each_of_its_layers_keeps() -> None:
    latent_too = replace(SIZES["8"], caches=((8, 256), (1, 576)))
    assert cached_numbers(latent_too, 1) == [2048, 576]
    assert cached_numbers(latent_too, 4) == [512, 576]
    assert cached_numbers(SIZES["8"], 2) == [1024] * 36
