"""Updates that go wrong between the trainer and a real engine are found, and the replica rebuilt.

The short form of ``python -m benchmarks.freshness``: one engine, each fault once.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

import pytest

import tests.engines  # noqa: F401 - the environment, before vllm is imported
from benchmarks.freshness_faults import FAULTS, caught, shown
from benchmarks.freshness_world import make_student, world

pytestmark = pytest.mark.engine

OF_ROWS = ("two swapped", "norm left out", "bias left out", "scaled matrix", "false version")
OF_RECEIVED = ("old snapshot", "wrong dtype", "truncated chunk")


@dataclass
class Found:
    """Reasons by fault, that of an ignored update of a tiny step, and how many rebuilds followed.

    ``afterwards`` is the difference of a sync without a fault, in bounds; ``learned`` counts the
    parameters that are known to be sent tensors.
    """

    reasons: dict[str, str]
    small: str
    rebuilds: int
    afterwards: float
    learned: float


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> Found:
    path = make_student(tmp_path_factory.mktemp("student"))

    async def run() -> Found:
        async with world(path, "float32") as w:
            await w.push()
            reasons = await shown(w)
            small = await caught(w, "ignored update", step=1e-8)
            w.move()
            metrics = await w.push()
            return Found(
                reasons,
                small,
                w.members.rebuilds,
                metrics["sync/freshness_nats"] / metrics["sync/freshness_limit_nats"],
                metrics["sync/learned_parameters"],
            )

    return asyncio.run(run())


@pytest.fixture(scope="module")
def of_a_mixture(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Reasons by fault; syncs change nothing that its log-probabilities show."""
    sizes = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64}
    path = make_student(tmp_path_factory.mktemp("mixture"), "qwen3_moe", **sizes)

    async def run() -> dict[str, str]:
        async with world(path, "float32") as w:
            await w.push()
            faults = ("one stale expert", "truncated chunk", "none")
            return {fault: await caught(w, fault, step=1e-8) for fault in faults}

    return asyncio.run(run())


def test_one_stale_expert_of_a_layer_is_found_by_the_digest_of_all(
    of_a_mixture: dict[str, str],
) -> None:
    reason = of_a_mixture["one stale expert"]
    assert "computes with other weights than were sent" in reason
    assert "layers.1.mlp.experts" in reason
    assert "w13_weight" in reason
    assert "layers.0" not in reason


def test_experts_that_came_otherwise_than_they_were_sent_are_found(
    of_a_mixture: dict[str, str],
) -> None:
    assert "was given other tensors than the trainer sent" in of_a_mixture["truncated chunk"]


def test_a_mixture_with_the_experts_that_were_sent_is_fresh(of_a_mixture: dict[str, str]) -> None:
    assert of_a_mixture["none"] == ""


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_is_found_within_one_sync(found: Found, fault: str) -> None:
    assert fault in found.reasons


@pytest.mark.parametrize("fault", OF_ROWS)
def test_other_weights_in_the_engine_change_log_probabilities(found: Found, fault: str) -> None:
    assert "its log-probabilities of held rows differ" in found.reasons[fault]


@pytest.mark.parametrize("fault", OF_RECEIVED)
def test_other_bytes_on_the_way_are_found_before_the_replica_generates(
    found: Found, fault: str
) -> None:
    assert "was given other tensors than the trainer sent" in found.reasons[fault]


def test_a_tensor_that_is_not_sent_is_the_trainers_fault(found: Found) -> None:
    assert "the trainer sends other tensors" in found.reasons["dropped tensor"]


def test_a_change_below_the_engines_own_rounding_is_found_by_digests(found: Found) -> None:
    assert "its engine computes with other weights than were sent" in found.small


def test_a_replica_whose_update_was_ignored_is_rebuilt_and_then_fresh(found: Found) -> None:
    assert found.rebuilds == len(
        FAULTS
    )  # a dropped tensor is not a replica's fault; and the small step
    assert found.afterwards < 1


def test_every_parameter_of_the_engine_is_known_to_be_sent_tensors(found: Found) -> None:
    """Embedding and norms as they are; the tied head, biases and matrices as they are packed."""
    assert found.learned == 20
