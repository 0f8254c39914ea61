"""Moments, or all of a rank, in host memory during training: the steps are the same.

On a CPU everything is in host memory, and the run keeps nothing there: here it is made to.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard

from async_opd.config.device_defaults import Offload, offloads
from async_opd.config.sections.train import TrainConfig
from benchmarks.local_ranks import in_processes
from tests.trainer.models import new_rank, random_sample, tiny_model
from tests.trainer.ranks import CPU, mesh_of, on_ranks
from tests.trainer.states import restore, state_of
from trainer.learner import Learner
from trainer.offload import HostMoments
from trainer.rank import Rank
from trainer.rank_group import RankSpec
from trainer.student.loading import EmptyStudent
from trainer.student.sharding import lone_mesh, own_part

pytestmark = pytest.mark.slow

TRAIN = TrainConfig(lr=1e-2, tokens_per_micro_batch=16, warmup_steps=0, weight_decay=0.1)
BATCHES = [[random_sample(10 * step + i, 5, k=6) for i in range(4)] for step in range(3)]


def rank_of(mesh: Any, offload: Offload, **changes: Any) -> Rank:
    train = TRAIN.model_copy(update={"offload": offload, **changes})
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("trainer.student.placed.offloads", lambda train, device: train.offload)
        return new_rank(tiny_model(), train, mesh=mesh)


def stepped(learner: Learner, batches: Any = BATCHES) -> dict[str, torch.Tensor]:
    for batch in batches:
        learner.train_batch(batch)
    return {name: weight.clone() for name, weight in learner.named_weights()}


@pytest.fixture(scope="module")
def expected() -> dict[str, torch.Tensor]:
    return stepped(Learner(rank_of(None, "none")))


@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize("offload", ["none", "moments", "parameters"])
def test_a_cpu_offloads_nothing(offload: Offload, device: str) -> None:
    found = offloads(TRAIN.model_copy(update={"offload": offload}), device)
    assert found == ("none" if device == "cpu" else offload)


# ── moments ────────────────────────────────────────────────────────────────────────────────────


def test_steps_with_moments_in_host_memory_are_the_same(expected: dict[str, torch.Tensor]) -> None:
    rank = rank_of(None, "moments")
    assert isinstance(rank.optimizer, HostMoments)
    found = stepped(Learner(rank))
    assert all(torch.equal(found[name], expected[name]) for name in expected)


def test_moments_in_host_memory_stay_where_they_are_between_two_turns() -> None:
    rank = rank_of(None, "moments")
    stepped(Learner(rank), BATCHES[:1])
    states = [v for s in rank.optimizer.state.values() for v in s.values() if v.ndim]
    rank.offload()
    rank.onload()
    after = [v for s in rank.optimizer.state.values() for v in s.values() if v.ndim]
    assert states
    assert all(one is other for one, other in zip(states, after, strict=True))


def test_one_parameters_moments_are_on_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every move is counted: to the device before a parameter's step, and back after it."""
    rank = rank_of(None, "moments")
    moved: list[tuple[int, torch.device]] = []
    move = rank.optimizer._move

    def counting(parameter: torch.Tensor, device: torch.device) -> None:
        moved.append((id(parameter), device))
        move(parameter, device)

    monkeypatch.setattr(rank.optimizer, "_move", counting)
    stepped(Learner(rank), BATCHES[:1])
    each = [id(p) for group in rank.optimizer.param_groups for p in group["params"]]
    assert [one for one, _ in moved] == [one for one in each for _ in range(2)]


def test_a_step_that_fails_leaves_the_groups_as_they_were(monkeypatch: pytest.MonkeyPatch) -> None:
    rank = rank_of(None, "moments")
    learner = Learner(rank)
    groups = rank.optimizer.inner.param_groups

    def no_memory() -> None:
        raise RuntimeError("no memory")

    monkeypatch.setattr(rank.optimizer.inner, "step", no_memory)
    with pytest.raises(RuntimeError, match="no memory"):
        learner.train_batch(BATCHES[0])
    assert rank.optimizer.inner.param_groups is groups


def test_a_restored_rank_goes_on_with_its_moments(expected: dict[str, torch.Tensor]) -> None:
    first = Learner(rank_of(None, "moments"))
    stepped(first, BATCHES[:2])
    second = Learner(rank_of(None, "moments"))
    restore(second, 2, state_of(first))
    found = stepped(second, BATCHES[2:])
    assert all(torch.equal(found[name], expected[name]) for name in expected)


# ── parameters, gradients and moments ──────────────────────────────────────────────────────────


@pytest.fixture(scope="module", params=[1, 2])
def found(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A folder with a saved model; weights after all steps, and again after going back one."""
    folder = tmp_path_factory.mktemp("host")
    tiny_model().save_pretrained(folder / "source")

    def rank(spec: RankSpec | None) -> Rank:
        return rank_of(mesh_of(spec) or lone_mesh(CPU), "parameters")

    def work(learner: Learner) -> Any:
        stepped(learner, BATCHES[:2])
        state = state_of(learner)
        learner.offload()
        learner.onload()
        last = stepped(learner, BATCHES[2:])
        restore(learner, 2, state)
        again = stepped(learner, BATCHES[2:])
        learner.save(str(folder / "source"), str(folder / "model"))
        return last, again

    return folder, *on_ranks(request.param, rank, work)


def test_steps_from_host_memory_are_the_same(found: Any, expected: dict[str, torch.Tensor]) -> None:
    assert all(torch.allclose(found[1][name], expected[name], atol=1e-5) for name in expected)


def test_weights_are_read_into_host_memory_whatever_the_mesh_computes_on(tmp_path: Path) -> None:
    """Where the mesh is of GPUs, a tensor that is moved to its device is in a GPU's memory."""
    tiny_model().save_pretrained(tmp_path)

    def lead(*_: Any) -> list[str]:
        student = EmptyStudent(tmp_path)
        fully_shard(student.model, mesh=lone_mesh(CPU))
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(DeviceMesh, "device_type", "meta")
            student._weights.fill(CPU, CPU)
        return [own_part(one.detach()).device.type for one in student.model.parameters()]

    assert set(in_processes(1, lead, lead, 60)) == {"cpu"}


def test_full_weights_of_a_single_rank_come_from_host_memory() -> None:
    """Others may use its GPU while it saves: it asks for no memory there."""

    def lead(*_: Any) -> list[bool]:
        rank = rank_of(lone_mesh(CPU), "parameters")
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(DeviceMesh, "device_type", "meta")
            named = list(rank.weights.exported(torch.float32))
        expected = dict(tiny_model().named_parameters())
        return [torch.equal(tensor, expected[name].data) for name, tensor in named]

    found = in_processes(1, lead, lead, 60)
    assert found
    assert all(found)


def test_they_go_on_from_a_checkpoint_bit_for_bit(found: Any) -> None:
    assert all(torch.equal(found[2][name], weight) for name, weight in found[1].items())


def test_the_model_that_is_saved_has_their_weights(found: Any) -> None:
    from transformers import AutoModelForCausalLM

    saved = AutoModelForCausalLM.from_pretrained(found[0] / "model", dtype=torch.float32)
    assert all(torch.equal(p, found[2][name]) for name, p in saved.named_parameters())
