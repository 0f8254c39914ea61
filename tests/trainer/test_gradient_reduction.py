"""Ranks that reduce their gradients once a step: the same gradients, and fewer messages."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import pytest
import torch

from async_opd.config.device_defaults import reduces_once
from async_opd.config.sections.train import TrainConfig
from async_opd.core.samples import Sample
from benchmarks.local_ranks import in_processes
from tests.trainer.models import new_rank, random_sample, tiny_model
from trainer.batches.micro_batches import MicroBatch
from trainer.batches.token_weights import TokenWeight
from trainer.follower import Follower
from trainer.rank import Rank
from trainer.rank_group import RankGroup, RankSpec
from trainer.student.sharding import full_tensor, join_mesh

pytestmark = pytest.mark.slow

When = Literal["auto", "step", "micro_batch"]
Dtype = Literal["float32", "bfloat16"]
CPU = torch.device("cpu")
SAMPLES = [random_sample(i, size, k=6) for i, size in enumerate([5, 1, 9, 3, 8])]


def micro_batch(samples: Sequence[Sample], weight: float = 0.1) -> MicroBatch:
    return MicroBatch(tuple(samples), tuple(TokenWeight(weight) for _ in samples), weight > 0)


IN_STEP = micro_batch(SAMPLES[:1], 0.0)
"""It only keeps a rank in step with the others."""
EVEN = {
    2: (
        [micro_batch(SAMPLES[:2]), micro_batch(SAMPLES[2:3])],
        [micro_batch(SAMPLES[3:4]), micro_batch(SAMPLES[4:])],
    ),
    4: (
        [micro_batch(SAMPLES[:1]), micro_batch(SAMPLES[1:2])],
        [micro_batch(SAMPLES[2:3]), IN_STEP],
        [micro_batch(SAMPLES[3:4]), IN_STEP],
        [micro_batch(SAMPLES[4:]), IN_STEP],
    ),
}
UNEVEN = {
    ranks: (
        [micro_batch(SAMPLES[:2]), micro_batch(SAMPLES[2:3]), micro_batch(SAMPLES[3:])],
        *[[IN_STEP] * 3] * (ranks - 1),
    )
    for ranks in EVEN
}


@dataclass(frozen=True)
class Case:
    """How ranks train, and what each of them computes in a step."""

    when: When
    dtype: Dtype
    even: bool


CASES = [
    Case(when, dtype, even)
    for dtype, even in (("float32", True), ("float32", False), ("bfloat16", True))
    for when in ("step", "micro_batch")
]


def rank_of(mesh: Any, when: When, dtype: Dtype) -> Rank:
    train = TrainConfig(max_grad_norm=1e9, dtype=dtype, reduce_gradients=when)
    return new_rank(tiny_model(), train, mesh=mesh)


def gradients(rank: Rank, step: Sequence[MicroBatch]) -> list[torch.Tensor]:
    rank.backward(step)
    return [full_tensor(p.grad).clone() for p in rank.model.parameters()]


def of_this_rank(spec: RankSpec) -> dict[Case, tuple[list[Any], int]]:
    """The gradients of each case after two steps of two micro-batches, and the reduce-scatters."""
    mesh, sent = join_mesh(spec, CPU), []
    name = "reduce_scatter_single"  # as FSDP2 calls it
    reduce_scatter = getattr(torch.distributed, name)

    def counting(*args: Any, **named: Any) -> Any:
        sent.append(1)
        return reduce_scatter(*args, **named)

    setattr(torch.distributed, name, counting)
    found = {}
    for case in CASES:
        step = (EVEN if case.even else UNEVEN)[spec.ranks][spec.rank]
        rank = rank_of(mesh, case.when, case.dtype)
        rank.backward(step)  # what it leaves must not reach the next step
        rank.apply(None)
        sent.clear()
        found[case] = [g.numpy() for g in gradients(rank, step)], len(sent)
    return found


@pytest.fixture(scope="module", params=EVEN)
def found(request: pytest.FixtureRequest) -> dict[Case, tuple[list[torch.Tensor], int]]:
    def lead(spec: RankSpec | None, rank_group: RankGroup) -> Any:
        return of_this_rank(spec)

    def follow(spec: RankSpec) -> Follower:
        of_this_rank(spec)
        return Follower(rank_of(None, "auto", "float32"))

    seen = in_processes(request.param, lead, follow, 120)
    return {
        case: ([torch.from_numpy(g) for g in made], sent) for case, (made, sent) in seen.items()
    }


@pytest.mark.parametrize("case", CASES, ids=str)
def test_the_gradients_are_those_of_one_rank(found: Any, case: Case) -> None:
    alone = gradients(rank_of(None, "auto", "float32"), [micro_batch(SAMPLES)])
    one, other = (torch.cat([g.flatten() for g in all_]) for all_ in (found[case][0], alone))
    assert (one - other).norm() <= (1e-5 if case.dtype == "float32" else 0.02) * other.norm()


def test_gradients_of_bfloat16_are_summed_in_float32(found: Any) -> None:
    step, micro_batches = (
        found[Case(when, "bfloat16", True)][0] for when in ("step", "micro_batch")
    )
    assert all(torch.allclose(a, b, atol=1e-7) for a, b in zip(step, micro_batches, strict=True))


def test_a_step_reduces_each_gradient_once(found: Any) -> None:
    for case in CASES:
        groups, micro_batches = 3, 2 if case.even else 3  # two layers; all else
        expected = groups if case.when == "step" else groups * micro_batches
        assert found[case][1] == expected, case


@pytest.mark.parametrize(
    ("when", "entries", "once"),
    [("auto", 4e9, False), ("auto", 2.6e9, True), ("step", 4e9, True), ("micro_batch", 1, False)],
)
def test_full_gradients_take_an_eighth_of_a_gpu(when: When, entries: float, once: bool) -> None:
    assert reduces_once(TrainConfig(reduce_gradients=when), int(entries), 85 << 30) is once


def test_parameters_in_host_memory_are_not_reduced_once_by_auto() -> None:
    """The full gradients would be on the GPU that offloading is to free."""
    assert not reduces_once(TrainConfig(offload="parameters"), 1, 85 << 30)
    assert reduces_once(TrainConfig(offload="parameters", reduce_gradients="step"), 1, 85 << 30)
