"""Ranks that each load their part of a student compute what one rank with all of it computes."""

from __future__ import annotations

import math
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed import distributed_c10d

from async_opd.config.run_config import RunConfig
from benchmarks.local_ranks import in_processes
from tests.trainer import families
from tests.trainer.models import samples_of, tiny_model
from tests.world.config import run_config
from trainer.build import build_follower, build_learner
from trainer.follower import Follower
from trainer.losses import build_objective
from trainer.rank import Rank
from trainer.rank_group import RankGroup, RankSpec
from trainer.student.attention_choice import attention_needs
from trainer.student.check import check_placed, check_student
from trainer.student.loading import EmptyStudent
from trainer.student.placed import PlacedStudent
from trainer.student.sharding import await_ranks, join_mesh

pytestmark = pytest.mark.slow

CPU = torch.device("cpu")
LORA = {"rank": 4, "targets": ["q_proj", "down_proj"]}
BATCH = samples_of(5, 0, 3, 9)
IDS = torch.arange(1, 8)[None]


def config(path: Path, **train: Any) -> RunConfig:
    model = {"model": str(path)}
    train = {"gradient_checkpointing": True, "lr": 1e-2, **train}
    return run_config(student=model, teachers={"t": model}, train=train)


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    found = tmp_path_factory.mktemp("student")
    tiny_model().save_pretrained(found)
    return found


def trained(learner: Any) -> dict[str, float]:
    """The loss of two steps, and what the engines would get."""
    losses = [learner.train_batch(BATCH).metrics["loss/total"] for _ in range(2)]
    return {"first": losses[0], "second": losses[1], **sums(learner)}


def sums(learner: Any) -> dict[str, float]:
    return {name: float(weight.double().sum()) for name, weight in learner.named_weights()}


DIVIDED: dict[str, dict[str, Any]] = {
    "all weights": {},
    "adapters": {"lora": LORA},
    "copies of shards": {"replicate": 2},
    "shared rows": {"context_parallel": 2},
}


@pytest.mark.parametrize("name", DIVIDED)
def test_two_ranks_that_load_their_parts_train_as_one_does(path: Path, name: str) -> None:
    settings = config(path, ranks=2, **DIVIDED[name])

    def lead(spec: RankSpec | None, rank_group: RankGroup) -> dict[str, float]:
        return trained(build_learner(settings, "cpu", spec, rank_group))

    def follow(spec: RankSpec) -> Follower:
        return build_follower(settings, "cpu", spec)

    found = in_processes(2, lead, follow, 120)
    lora = DIVIDED[name].get("lora")
    expected = trained(build_learner(config(path, lora=lora), "cpu"))
    assert found.keys() == expected.keys()
    wrong = [
        k for k in found if not math.isclose(found[k], expected[k], rel_tol=1e-4, abs_tol=1e-4)
    ]
    assert wrong == []
    assert expected["second"] < expected["first"]


@pytest.fixture(scope="module")
def wholes(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """By family: what two ranks computed with the whole model of a sharded one, and expected."""
    folder = tmp_path_factory.mktemp("wholes")
    made = {"Qwen3": tiny_model, "Mixtral": families.mixtral, "Phi3": families.phi3}
    for name, model in made.items():
        model().save_pretrained(folder / name)

    def logits(model: Any) -> torch.Tensor:
        with torch.no_grad():
            return model(IDS, use_cache=False).logits.clone()

    def rank_of(name: str, spec: RankSpec | None) -> tuple[Any, Any, Any]:
        student = EmptyStudent(folder / name, 64)
        mesh = None if spec is None else join_mesh(spec, CPU)
        settings = config(folder / name)
        objective = build_objective(settings.loss)
        rank = Rank(
            PlacedStudent(
                student.model,
                objective,
                settings.train,
                CPU,
                mesh=mesh,
                fill=lambda: student.fill(CPU),
            )
        )
        return student.whole(), rank, mesh

    def of(name: str, spec: RankSpec | None) -> dict[str, Any]:
        whole, rank, _ = rank_of(name, spec)
        block = whole.base_model.layers[0]
        found = {"logits": logits(whole).tolist(), "freed": next(block.parameters()).is_meta}
        check_placed(rank.student, check_student(whole, 64), 64)
        return {**found, "needs": attention_needs(whole)}

    def lead(spec: RankSpec | None, _: RankGroup) -> dict[str, Any]:
        return of(name, spec)

    def follow(spec: RankSpec) -> Any:
        of(name, spec)

    found = {}
    for name in made:
        found[name] = in_processes(2, lead, follow, 120), of(name, None)
    return found


@pytest.mark.parametrize("name", ["Qwen3", "Mixtral", "Phi3"])
def test_the_whole_model_of_ranks_is_the_model_itself(name: str, wholes: dict[str, Any]) -> None:
    two, one = wholes[name]
    assert two["logits"] == one["logits"]
    assert two["needs"] == one["needs"]
    assert one["needs"].layers == 2


def test_a_block_has_no_weights_once_it_has_computed(wholes: dict[str, Any]) -> None:
    assert all(two["freed"] and not one["freed"] for two, one in wholes.values())


# ── ranks that read at different speeds ────────────────────────────────────────────────────────


@pytest.fixture
def store(monkeypatch: pytest.MonkeyPatch) -> Any:
    found = torch.distributed.HashStore()
    monkeypatch.setattr(distributed_c10d, "_get_default_store", lambda: found)
    return found


def spec(rank: int, start_s: float) -> RankSpec:
    return RankSpec(rank, 2, "host", 1, timeout_s=0.001, start_s=start_s, secret=b"")


def test_a_rank_awaits_the_others_beyond_the_bound_of_collectives(store: Any) -> None:
    waiting = threading.Thread(target=await_ranks, args=(spec(0, 30.0), "weights"))
    waiting.start()
    waiting.join(0.05)
    assert waiting.is_alive()
    await_ranks(spec(1, 30.0), "weights")
    waiting.join(30)
    assert not waiting.is_alive()


def test_a_rank_that_never_comes_is_an_error(store: Any) -> None:
    with pytest.raises(RuntimeError, match=r"(?i)time"):
        await_ranks(spec(0, 0.01), "weights")
