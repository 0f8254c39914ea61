"""Rollout engines on the GPUs of the trainer: what goes together, and what they take."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import ValidationError

from async_opd.checks.gpu_plan import units
from async_opd.checks.resources import guests_of, hosts_of, misplaced, pools
from async_opd.config.run_config import RunConfig
from async_opd.core.errors import StageError
from rollouter.spec import StudentEngineSpec
from rollouter.transports import chosen
from tests.world.config import run_config

WITH_TRAIN = {"placement": "colocated", "with": "train"}


def config(rollout: dict[str, Any], **sections: Any) -> RunConfig:
    return run_config(rollout=rollout, **sections)


@pytest.mark.parametrize("rollout", [{"placement": "colocated"}, {"with": "train"}])
def test_placement_and_pool_are_given_together(rollout: dict[str, Any]) -> None:
    with pytest.raises(ValidationError, match="'placement: colocated' and 'with: train' together"):
        config(rollout)


def test_nccl_is_refused_between_processes_on_one_gpu() -> None:
    with pytest.raises(ValidationError, match=r"sync.backend: .*refuses two processes on one GPU"):
        config(WITH_TRAIN, sync={"backend": "nccl"})


def test_weights_of_a_cluster_that_the_environment_names_go_through_gloo(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("RAY_ADDRESS", "10.0.0.1:6379")
    assert config(WITH_TRAIN).sync_backend == "gloo"


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_weights_travel_through_host_memory_there_also_between_gpus(
    device: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Shared by all processes of one machine; a cluster that is joined may have several."""
    joined = {"address": "auto"}
    assert chosen(config(WITH_TRAIN).sync_backend, device) == "shared_memory"
    assert chosen(config(WITH_TRAIN, cluster=joined).sync_backend, device) == "gloo"
    assert chosen(config({}).sync_backend, "cuda") == "nccl"
    with pytest.raises(StageError):
        chosen("nccl", "cpu")
    monkeypatch.setenv("RAY_ADDRESS", "10.0.0.1:6379")
    assert chosen(config(WITH_TRAIN).sync_backend, device) == "gloo"


def test_a_teacher_on_the_same_gpus_is_a_guest_of_the_engines() -> None:
    teachers = {"t": {"model": "t", "placement": "colocated", "with": "train"}}
    with pytest.raises(ValidationError, match=r"teachers.t.with: found train, whose GPUs"):
        config(WITH_TRAIN, teachers=teachers)
    teachers = {"t": {"model": "t", "placement": "colocated", "with": "rollout"}}
    made = config(WITH_TRAIN, teachers=teachers)
    assert guests_of(made, "train") == ["rollout", "teachers.t"]
    assert sum(pool.gpus for pool in pools(made)) == 1


def test_they_take_no_gpus_beside_the_trainers() -> None:
    made = config(WITH_TRAIN | {"replicas": 2, "tensor_parallel": 2}, train={"ranks": 4})
    gpus = {pool.name: pool.gpus for pool in pools(made)}
    assert gpus == {"rollout": 0, "teachers.t": 1, "train": 4}
    assert hosts_of(made, "rollout") == [range(2), range(2, 4)]
    assert [unit.gpus for unit in units(pools(made)) if unit.pool == "train"] == [2, 2]
    assert list(misplaced(made)) == []


def test_more_engines_than_ranks_are_a_fault() -> None:
    (fault,) = misplaced(config(WITH_TRAIN | {"replicas": 2}))
    assert fault[0] == "rollout.replicas"


@pytest.mark.parametrize("rollout", [{}, WITH_TRAIN], ids=["dedicated", "colocated"])
def test_only_engines_that_share_their_gpu_can_sleep(rollout: dict[str, Any]) -> None:
    made = StudentEngineSpec.of(config(rollout), "cuda", (), "student/0", 0, 0, 0)
    assert made.kwargs["enable_sleep_mode"] is bool(rollout)
    assert made.transfer_backend == ("shared_memory" if rollout else "nccl")
