"""``auto`` by device: its values, their users, and that ``check`` and config.yaml show them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from async_opd.config.device_defaults import (
    ALLOCATOR_KEYS,
    engine_sizes,
    recomputation,
    resolved,
    train_threads,
)
from async_opd.config.load import dump_config, load_config
from async_opd.config.run_config import RunConfig
from async_opd.config.sections.engine import EngineConfig
from async_opd.config.sections.plan import PlanConfig
from async_opd.config.sections.train import TrainConfig
from async_opd.models.engine_args import Device, engine_kwargs, trainer_env
from async_opd.tools.plan.inputs import setting_of
from tests.checks.inputs import EXAMPLE, FEW
from tests.world.cli import Cli
from tests.world.config import run_config

KEYS = ("max_num_seqs", "max_num_batched_tokens")


def config(**changes: Any) -> RunConfig:
    server = {"kind": "endpoint", "urls": ["http://a/v1"], "served_model": "m"}
    return run_config(**{"teachers": {"own": {"model": "t"}, "server": server}} | changes)


@pytest.mark.parametrize(("device", "expected"), [("cpu", (64, 2048)), ("cuda", (256, 8192))])
def test_an_engine_has_the_sizes_of_its_device(device: Device, expected: tuple[int, int]) -> None:
    made = engine_kwargs(
        EngineConfig(), model="m", device=device, tensor_parallel=1, seed=0, trust_remote_code=False
    )
    assert tuple(made[key] for key in KEYS) == expected


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_given_sizes_are_kept(device: Device) -> None:
    given = dict(zip(KEYS, (7, 100), strict=True))
    assert engine_sizes(EngineConfig.model_validate(given), device) == (7, 100)


def test_an_engine_step_has_a_token_for_each_sequence() -> None:
    """vLLM refuses fewer."""
    assert engine_sizes(EngineConfig(max_num_seqs=10_000), "cuda") == (10_000, 10_000)


def test_activations_are_recomputed_on_gpus_by_default() -> None:
    assert [recomputation(TrainConfig(), device) for device in ("cpu", "cuda")] == ["none", "full"]
    for given in ("none", "selective", "full"):
        assert recomputation(TrainConfig(gradient_checkpointing=given), "cuda") == given


@pytest.mark.parametrize(("given", "expected"), [(True, "full"), (False, "none")])
def test_yes_and_no_are_kinds_of_recomputation_too(given: bool, expected: str) -> None:
    made = TrainConfig.model_validate({"gradient_checkpointing": given})
    assert made.gradient_checkpointing == expected


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_a_resolved_config_has_the_values_of_its_device(device: Device) -> None:
    made = resolved(config(), device)
    expected = engine_sizes(EngineConfig(), device)
    for engine in (made.rollout.engine, made.teachers["own"].engine):  # type: ignore[union-attr]
        assert (engine.max_num_seqs, engine.max_num_batched_tokens) == expected
    assert made.train == config().train, "the student's layers decide whether any are recomputed"
    assert made.teachers["server"] == config().teachers["server"]
    assert resolved(made, "cpu") == made


def test_a_call_to_a_teacher_is_as_large_on_every_device() -> None:
    for one in (config(), resolved(config(), "cuda"), resolved(config(), "cpu")):
        assert one.teachers["own"].batch_size == 64


def test_the_run_keeps_what_its_device_had(tmp_path: Path) -> None:
    """A plan of its directory, on a machine without GPUs, has the engines' slots."""
    file = tmp_path / "config.yaml"
    file.write_text(dump_config(resolved(config(), "cuda")))
    shown = yaml.safe_load(file.read_text())
    assert [shown["rollout"]["engine"][key] for key in KEYS] == [256, 8192]
    assert load_config(file).train.gradient_checkpointing == "auto"


@pytest.mark.parametrize(
    ("gpus", "expected"),
    [
        (
            "",
            [
                "compile: false",
                "gradient_checkpointing: auto",
                "max_num_batched_tokens: 2048",
                "max_num_seqs: 64",
            ],
        ),
        (
            "0,1,2,3",
            [
                "compile: true",
                "gradient_checkpointing: auto",
                "max_num_batched_tokens: 8192",
                "max_num_seqs: 256",
            ],
        ),
    ],
)
@pytest.mark.usefixtures("torch_for_gpus")
def test_check_shows_what_auto_is(
    gpus: str, expected: list[str], cli: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", gpus)
    lines = {line.strip() for line in cli("check", EXAMPLE, *FEW).out.splitlines()}
    shown = sorted(
        one for one in lines if one.startswith((*KEYS, "gradient_checkpointing", "compile:"))
    )
    assert shown == expected


@pytest.mark.parametrize(("device", "slots"), [("auto", 256), ("cuda", 256), ("cpu", 64)])
def test_a_plan_is_one_for_gpus_unless_the_config_says_otherwise(device: str, slots: int) -> None:
    speeds = {
        "rollout": {"step_s": 0.01},
        "teachers": {"own": {"tokens_per_s": 100}},
        "train": {"tokens_per_s": 100},
        "prompt_tokens": 10,
        "response_tokens": 100,
    }
    made = config(teachers={"own": {"model": "t"}}, cluster={"device": device})
    assert setting_of(made, PlanConfig.model_validate(speeds), "c.yaml").rollout.slots == slots


# ── the allocator ──────────────────────────────────────────────────────────────────────────────


@pytest.fixture
def nothing_given(monkeypatch: pytest.MonkeyPatch) -> None:
    for key in ALLOCATOR_KEYS:
        monkeypatch.delenv(key, raising=False)


@pytest.mark.usefixtures("nothing_given")
def test_ranks_on_gpus_have_segments_that_grow() -> None:
    assert trainer_env("cpu", 3)["OMP_NUM_THREADS"] == "3"
    grown = {"OMP_NUM_THREADS": "3", "PYTORCH_ALLOC_CONF": "expandable_segments:True"}
    assert trainer_env("cuda", 3) == grown


@pytest.mark.usefixtures("nothing_given")
@pytest.mark.parametrize("key", ALLOCATOR_KEYS)
def test_settings_of_the_user_replace_ours_on_every_node(
    key: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """torch reads several variables; one of ours could win over the user's."""
    monkeypatch.setenv(key, "max_split_size_mb:512")
    assert trainer_env("cuda", 1) == {"OMP_NUM_THREADS": "1", key: "max_split_size_mb:512"}


SMALL, LARGE = 600_000, 245_000_000


@pytest.mark.parametrize(
    ("train", "device", "cores", "entries", "expected"),
    [
        ({}, "cpu", 2, SMALL, 1),
        ({}, "cpu", 2, LARGE, 2),  # measured faster, although two engines share the cores
        ({}, "cpu", 1, LARGE, 1),
        ({}, "cpu", 16, LARGE, 14),  # a student's engine and a teacher's have the others
        ({}, "cpu", 16, 3 * 5_000_000, 3),
        ({"ranks": 2}, "cpu", 16, LARGE, 7),
        ({"ranks": 2}, "cpu", 2, LARGE, 1),
        ({"threads": 5}, "cpu", 2, SMALL, 5),
        ({}, "cuda", 16, LARGE, 1),
        ({"offload": "parameters", "ranks": 4}, "cuda", 16, LARGE, 4),
    ],
)
def test_a_rank_has_the_threads_that_the_cores_leave_it(
    train: dict[str, Any], device: str, cores: int, entries: int, expected: int
) -> None:
    assert train_threads(config(train=train), device, cores, entries) == expected


def test_a_rank_with_auto_threads_starts_with_one() -> None:
    assert trainer_env("cpu", "auto")["OMP_NUM_THREADS"] == "1"


@pytest.mark.parametrize(("given", "expected"), [(None, "passive"), ("active", "active")])
def test_threads_of_a_rank_on_a_cpu_leave_the_cores_to_engines_while_they_wait(
    given: str | None, expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("OMP_WAIT_POLICY", raising=False)
    if given is not None:
        monkeypatch.setenv("OMP_WAIT_POLICY", given)
    assert trainer_env("cpu", 2)["OMP_WAIT_POLICY"] == expected
