"""Checkpoints of two ranks, one, three and 2 × 2: each writes its share, any go on from it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from safetensors.torch import load_file, save_file

from async_opd.config.sections.train import TrainConfig
from async_opd.core.errors import CheckpointError
from tests.trainer.models import new_rank, random_sample, tiny_model
from tests.trainer.ranks import mesh_of, on_ranks
from trainer.learner import Learner
from trainer.offload import HostBuffers, HostMoments
from trainer.optimizer import LowBitAdamW
from trainer.rank import Rank
from trainer.rank_group import RankSpec
from trainer.saving.shards import Part, Shards, Stamp, shard_name, write_shard
from trainer.saving.state import copy_parts, load_parts

pytestmark = pytest.mark.slow

TRAIN = TrainConfig(lr=1e-2, tokens_per_micro_batch=16)
BATCH = [random_sample(i, size, k=6) for i, size in enumerate([5, 1, 9, 3, 7, 2])]


def rank(spec: RankSpec | None, seed: int = 0, train: TrainConfig = TRAIN) -> Rank:
    return new_rank(tiny_model(seed), train, mesh=mesh_of(spec, train.replicate))


def written(learner: Learner, folder: Path) -> Path:
    """A checkpoint of the learner; no rank may gather a tensor."""
    folder.mkdir()
    with patch("torch.distributed.tensor.DTensor.full_tensor", side_effect=AssertionError):
        learner.capture(version=0)
        learner.write(str(folder))
    return folder


def replicated_parts(spec: RankSpec, folder: Path) -> None:
    """Notes which tensors of a module this rank writes, if its parts are copies of another's."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    module = torch.nn.Linear(4, 6)
    copies = init_device_mesh("cpu", (spec.ranks, 1), mesh_dim_names=("replicate", "shard"))
    fully_shard(module, mesh=copies)
    optimizer = torch.optim.AdamW(module.parameters())
    parts = copy_parts(module, optimizer, spec.rank)
    (folder / f"parts of {spec.rank}").write_text(" ".join(sorted(parts)))


def source(folder: Path) -> str:
    """A model whose config.json names bfloat16."""
    tiny_model(0).bfloat16().save_pretrained(folder / "source")
    return str(folder / "source")


def trained_by_two(folder: Path) -> str:
    """Two ranks make a step and write it; returns the fault of a write that rank 1 cannot do."""

    def rank_of(spec: RankSpec | None) -> Rank:
        made = rank(spec)
        replicated_parts(spec, folder)
        return made

    def work(learner: Learner) -> str:
        learner.train_batch(BATCH)
        written(learner, folder / "two")
        (folder / "full" / shard_name(1, 2)).mkdir(parents=True)
        learner.capture(version=0)
        with pytest.raises(CheckpointError) as error:
            learner.write(str(folder / "full"))
        full = patch("trainer.saving.export.save_file", side_effect=OSError(28, "full"))
        with full, pytest.raises(OSError, match="full"):
            learner.save(source(folder), str(folder / "model"))
        learner.train_batch(BATCH)  # the ranks are in step
        learner.save(source(folder), str(folder / "model"))
        written(learner, folder / "two, a step later")
        return error.value.cause

    return on_ranks(2, rank_of, work)


def continued(folder: Path, name: str, **ranks: int) -> None:
    """Several ranks read what one wrote, write it, make a step and write that."""
    train = TRAIN.model_copy(update=ranks)

    def work(learner: Learner) -> None:
        learner.restore(str(folder / "one"))
        written(learner, folder / name)
        learner.train_batch(BATCH)
        written(learner, folder / f"{name}, a step later")

    on_ranks(train.ranks, lambda spec: rank(spec, 3, train), work)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Checkpoints of two ranks, of one that goes on from it, and of others that do from that.

    Three ranks, and two copies of two ranks that share rows.
    """
    folder = tmp_path_factory.mktemp("resharding")
    (folder / "fault").write_text(trained_by_two(folder))
    alone = Learner(rank(None, seed=5))
    alone.restore(str(folder / "two"))
    written(alone, folder / "one")
    continued(folder, "three", ranks=3)
    continued(folder, "copies", ranks=4, replicate=2, context_parallel=2)
    return folder


def tensors(folder: Path) -> dict[str, torch.Tensor]:
    shards = Shards(folder)
    return {name: shards.read(name) for name in shards.names if not name.startswith("rng/")}


@pytest.mark.parametrize("ranks", ["one", "three", "copies"])
def test_weights_and_moments_are_bit_for_bit_those_of_two_ranks(folder: Path, ranks: str) -> None:
    two, others = tensors(folder / "two"), tensors(folder / ranks)
    assert others.keys() == two.keys()
    assert [name for name, tensor in two.items() if not torch.equal(tensor, others[name])] == []
    assert any(name.endswith("/exp_avg_sq") and tensor.any() for name, tensor in two.items())


@pytest.mark.parametrize("ranks", ["three", "copies"])
def test_others_make_the_step_that_two_ranks_would_have_made(folder: Path, ranks: str) -> None:
    later = folder / f"{ranks}, a step later"
    two, others = tensors(folder / "two, a step later"), tensors(later)
    assert all(torch.allclose(two[name], tensor, atol=1e-5) for name, tensor in others.items())
    assert Shards(later).stamp.step == 2


@pytest.mark.parametrize(("name", "ranks"), [("two", 2), ("three", 3)])
def test_each_rank_writes_its_share_and_copies_once(folder: Path, name: str, ranks: int) -> None:
    files = [(folder / name / shard_name(at, ranks)).stat().st_size for at in range(ranks)]
    assert max(files) < 1.2 * (folder / "one" / shard_name(0, 1)).stat().st_size / ranks + 20_000
    files = [(folder / "copies" / shard_name(at, 4)).stat().st_size for at in range(4)]
    assert sum(files) < (folder / "one" / shard_name(0, 1)).stat().st_size + 4 * 20_000


def test_one_rank_writes_what_several_have_and_a_failed_write_is_named(folder: Path) -> None:
    first, second = ((folder / f"parts of {at}").read_text() for at in range(2))
    assert first == "model/bias model/weight rng/0/cpu"
    assert second == "rng/1/cpu"
    fault = (folder / "fault").read_text()
    assert f"{folder}/full/{shard_name(1, 2)} cannot be written" in fault
    assert (folder / "two, a step later").exists()


def test_two_ranks_save_the_model_in_the_precision_of_its_source(folder: Path) -> None:
    saved = load_file(folder / "model" / "model.safetensors")
    state = tensors(folder / "two, a step later")
    assert json.loads((folder / "model" / "config.json").read_text())["dtype"] == "bfloat16"
    assert saved.keys() == {n.removeprefix("model/") for n in state if n.startswith("model/")}
    assert all(torch.equal(t, state[f"model/{n}"].bfloat16()) for n, t in saved.items())


def stored(folder: Path, model: Any, optimizer: Any, rank: int = 0) -> Shards:
    write_shard(folder, rank, Stamp(1, 1, 1, ""), copy_parts(model, optimizer, rank))
    return Shards(folder)


def test_copies_in_the_same_room_are_in_the_same_memory() -> None:
    model = torch.nn.Linear(3, 2)
    room = HostBuffers(16)
    copies = [copy_parts(model, adamw(model), room=room) for _ in range(2)]
    one, other = (parts["model/weight"].tensor.data_ptr() for parts in copies)
    assert one == other


def test_a_part_keeps_its_dtype_behind_an_odd_number_of_bytes() -> None:
    model = torch.nn.Module()
    model.register_buffer("a", torch.ones(3, dtype=torch.uint8))
    model.register_buffer("b", torch.full((2,), 7.0))
    parts = copy_parts(model, adamw(torch.nn.Linear(1, 1)))
    assert torch.equal(parts["model/b"].tensor, torch.full((2,), 7.0))


def adamw(model: Any) -> torch.optim.AdamW:
    return torch.optim.AdamW([one for one in model.parameters() if one.requires_grad])


def test_a_parameter_that_is_not_trained_is_not_stored(tmp_path: Path) -> None:
    model = torch.nn.Linear(2, 3)
    model.weight.requires_grad_(False)
    shards = stored(tmp_path, model, adamw(model))
    assert shards.names == {"model/bias", "rng/0/cpu"}
    other = torch.nn.Linear(2, 3)
    other.weight.requires_grad_(False)
    before = other.weight.clone()
    load_parts(other, adamw(other), shards)
    assert torch.equal(other.bias, model.bias)
    assert torch.equal(other.weight, before)


@pytest.mark.parametrize(("rank", "its"), [(0, True), (1, False)])
def test_a_rank_goes_on_with_its_random_state(rank: int, its: bool, tmp_path: Path) -> None:
    model = torch.nn.Linear(2, 3)
    torch.manual_seed(1)
    shards = stored(tmp_path, model, adamw(model))
    drawn = torch.rand(3)
    torch.manual_seed(2)
    own = torch.rand(3)
    torch.manual_seed(2)
    load_parts(model, adamw(model), shards, rank)
    assert torch.equal(torch.rand(3), drawn if its else own)


@pytest.mark.parametrize(
    "change",
    [
        lambda model: setattr(model, "bias", None),
        lambda model: setattr(model, "bias", torch.nn.Parameter(torch.zeros(4))),
        lambda model: setattr(model, "bias", torch.nn.Parameter(torch.zeros(3).bfloat16())),
    ],
    ids=["a parameter less", "another shape", "another type"],
)
def test_a_state_of_another_model_is_refused(change: Any, tmp_path: Path) -> None:
    shards = stored(tmp_path, torch.nn.Linear(2, 3), adamw(torch.nn.Linear(2, 3)))
    other = torch.nn.Linear(2, 3)
    change(other)
    with pytest.raises(CheckpointError, match=r"of another model: \['bias'\]"):
        load_parts(other, adamw(other), shards)


def test_the_single_file_of_an_earlier_version_is_read(tmp_path: Path) -> None:
    model, other = torch.nn.Linear(2, 3), torch.nn.Linear(2, 3)
    optimizer = adamw(model)
    model(torch.ones(2)).sum().backward()
    optimizer.step()
    parts: dict[str, Part] = dict(copy_parts(model, optimizer))
    names = {"rng/0/cpu": "rng/cpu"}
    save_file(
        {names.get(name, name): part.tensor for name, part in parts.items()},
        tmp_path / "trainer.safetensors",
        metadata={"step": "1", "version": "1"},
    )
    again = adamw(other)
    load_parts(other, again, Shards(tmp_path), rank=1)
    assert torch.equal(other.weight, model.weight)
    for key, value in optimizer.state[model.weight].items():
        assert torch.equal(again.state[other.weight][key], value)


@pytest.mark.parametrize(
    ("optimizer", "moments", "steps"),
    [
        (lambda one: torch.optim.AdamW(one, fused=True), "meta", "meta"),
        (lambda one: HostMoments(torch.optim.AdamW(one, fused=True)), "cpu", "meta"),
        (
            lambda one: LowBitAdamW([{"params": one}], 1e-4, (0.9, 0.9), "bfloat16", print),
            "meta",
            "cpu",
        ),
    ],
    ids=["on the device", "in host memory", "of few bits"],
)
def test_moments_are_read_to_where_the_optimizer_has_them(
    optimizer: Any, moments: str, steps: str, tmp_path: Path
) -> None:
    """The device is one that holds nothing."""
    model = torch.nn.Linear(2, 3)
    before = adamw(model)
    model(torch.ones(2)).sum().backward()
    before.step()
    shards = stored(tmp_path, model, before)
    on_device = torch.nn.Linear(2, 3, device="meta")
    after = optimizer(list(on_device.parameters()))
    load_parts(on_device, after, shards)
    found = after.state[on_device.weight]
    assert (found["exp_avg"].device.type, found["step"].device.type) == (moments, steps)
