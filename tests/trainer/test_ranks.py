"""Several ranks train as one does: the same steps, weights, checkpoints and models."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from async_opd.config.sections.train import TrainConfig
from async_opd.core.batch import Batch
from async_opd.core.errors import StageError
from async_opd.core.samples import Sample
from async_opd.weight_sync.layout import held_rows
from benchmarks.local_ranks import in_processes
from tests.trainer import families
from tests.trainer.attention import double_scale, reference
from tests.trainer.models import VOCABULARY, new_rank, random_sample, tiny_model
from tests.trainer.ranks import mesh_of, on_ranks
from tests.trainer.states import State, restore, state_of
from trainer.batches.shares import fetch
from trainer.follower import Follower
from trainer.learner import Learner
from trainer.rank import Rank
from trainer.rank_group import RankGroup, RankSpec
from trainer.student.attention import register_kernel
from trainer.student.check import check_placed, check_student

pytestmark = pytest.mark.slow

RANKS, STEPS = 2, 3
CPU = torch.device("cpu")
TRAIN = TrainConfig(lr=1e-2, tokens_per_micro_batch=16, weight_decay=0.1, max_grad_norm=0.5)
BATCHES = (
    [random_sample(i, size, k=6) for i, size in enumerate([5, 1, 9, 3, 0, 7, 2])],
    [random_sample(i, size, k=6) for i, size in enumerate([0, 0, 4])],  # of one rank's worth
    [random_sample(i, size, k=6) for i, size in enumerate([0, 0])],
)


@dataclass(frozen=True)
class Case:
    """A student, and the dimensions of its ranks."""

    tied: bool
    ranks: int = RANKS
    replicate: int = 1
    context_parallel: int = 1

    @property
    def train(self) -> TrainConfig:
        return TRAIN.model_copy(update={k: v for k, v in vars(self).items() if k != "tied"})


CASES = {
    "tied": Case(True),
    "untied": Case(False),
    "copies": Case(True, replicate=2),
    "context × shard": Case(True, 4, context_parallel=2),
    "replicate × shard": Case(False, 4, replicate=2),
    "replicate × context": Case(False, 4, 2, 2),
}


def model(tied: bool, seed: int = 0) -> Any:
    made = tiny_model(seed)
    if not tied:
        torch.manual_seed(3)
        made.config.tie_word_embeddings = False
        made.lm_head.weight = torch.nn.Parameter(torch.randn_like(made.lm_head.weight) / 6)
    return made


def trained(learner: Learner, batches: Sequence[list[Sample]]) -> list[dict[str, float]]:
    return [learner.train_batch(batch).metrics for batch in batches]


class Scored:
    """The queue of one process: batch i under lease i. It records what is fetched."""

    def __init__(self) -> None:
        self.fetched: list[str] = []

    async def fetch(self, topic: str, leased: Mapping[int, Sequence[str]]) -> Batch:
        ((lease, uids),) = leased.items()
        self.fetched += uids
        return Batch.pack(s for s in BATCHES[lease] if s.rollout.uid in uids)


def trained_by_fetching(
    learner: Learner, rank_group: RankGroup, queue: Any
) -> list[dict[str, float]]:
    """The metrics of steps of which each rank fetches its own samples."""
    metrics = []
    for lease, batch in enumerate(BATCHES):
        plan = learner.plan([sample.header for sample in batch])
        own, *others = plan.shares([lease] * len(batch), rank_group.ranks, lease)
        rest = rank_group.dispatch("fetch", [(share,) for share in others])()
        first = asyncio.run(fetch(queue, own, learner.vocabularies))
        repeated = sum(one.repetition for one in (first, *rest))
        metrics.append(learner.train(plan, first.micro_batches, repeated, lease).metrics)
    return metrics


def held_logprobs(learner: Learner) -> torch.Tensor:
    """Log-probabilities of held rows."""
    found = learner.reference(held_rows(VOCABULARY, 20))
    return torch.cat([torch.from_numpy(row) for row in found.logprobs])


def ranks(case: Case, folder: Path) -> dict[str, Any]:
    """What the ranks found, in processes of their own: they train, go back and train on."""
    scored: Any = Scored()

    def rank_of(spec: RankSpec) -> Rank:
        return new_rank(model(case.tied), case.train, mesh=mesh_of(spec, case.replicate))

    def lead(spec: RankSpec | None, rank_group: RankGroup) -> dict[str, Any]:
        learner = Learner(rank_of(spec), rank_group=rank_group)
        found: dict[str, Any] = {"first": trained(learner, BATCHES[:1])}
        found["reference"] = held_logprobs(learner)
        state = state_of(learner)
        found["rest"] = trained(learner, BATCHES[1:])
        found["weights"] = dict(learner.named_weights())
        found["reference of these weights"] = held_logprobs(learner)
        restore(learner, 1, state)
        found["again"] = trained(learner, BATCHES[1:])
        found["weights again"] = dict(learner.named_weights())
        found["state"] = state
        restore(learner, 1, state)
        for batch in BATCHES[1:]:
            learner.offload()
            learner.onload()
            learner.train_batch(batch)
        found["weights of offloaded ranks"] = dict(learner.named_weights())
        learner.free_cache()
        source = folder / "source"
        model(case.tied).save_pretrained(source)
        learner.save(str(source), str(folder / "model"))
        restore(learner, 1, state)
        found["given"] = trained(learner, BATCHES)
        found["weights of given"] = dict(learner.named_weights())
        restore(learner, 1, state)
        queue = Scored()
        found["fetched"] = trained_by_fetching(learner, rank_group, queue)
        found["weights of fetched"] = dict(learner.named_weights())
        found["of the first rank"] = queue.fetched
        torch.save(found, folder / "found.pt")
        return {}

    in_processes(case.ranks, lead, lambda spec: Follower(rank_of(spec), scored), 120)
    found: dict[str, Any] = torch.load(folder / "found.pt", weights_only=True)
    return found


@pytest.fixture(scope="module", params=CASES)
def case(request: pytest.FixtureRequest) -> Case:
    return CASES[request.param]


@pytest.fixture(scope="module")
def tied(case: Case) -> bool:
    return case.tied


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("ranks")


@pytest.fixture(scope="module")
def found(case: Case, folder: Path) -> dict[str, Any]:
    return ranks(case, folder)


@pytest.fixture(scope="module")
def alone(tied: bool) -> tuple[list[dict[str, float]], State, Learner]:
    """Metrics of every step of one rank, its state after the first, and itself."""
    learner = Learner(new_rank(model(tied), TRAIN))
    metrics = trained(learner, BATCHES[:1])
    state = state_of(learner)
    return [*metrics, *trained(learner, BATCHES[1:])], state, learner


@pytest.fixture(scope="module")
def half() -> tuple[dict[str, float], dict[str, float]]:
    """Metrics of a step under bfloat16, of one rank and of two."""

    def rank_of(spec: RankSpec | None) -> Rank:
        return new_rank(model(False), TRAIN.model_copy(update=HALF), mesh=mesh_of(spec))

    def step(learner: Learner) -> dict[str, float]:
        return learner.train_batch(BATCHES[0]).metrics

    return step(Learner(rank_of(None))), on_ranks(RANKS, rank_of, step)


HALF = {"dtype": "bfloat16"}
Alone = tuple[list[dict[str, float]], State, Learner]
TIMES = {"train/micro_batches", "train/compute_s", "train/tflops"}
OF_THE_DIVISION = TIMES | {"loss/topk_overlap", "teacher/t/topk_overlap"}
"""Overlaps are measured on a sample of rows, every 16th of a tile."""


def test_every_step_has_the_metrics_of_one_rank(found: dict[str, Any], alone: Alone) -> None:
    for expected, seen in zip(alone[0], found["first"] + found["rest"], strict=True):
        assert seen.keys() == expected.keys()
        for key in expected.keys() - OF_THE_DIVISION:
            assert math.isclose(seen[key], expected[key], rel_tol=1e-4, abs_tol=1e-6), key


def test_the_engines_get_the_weights_of_one_rank(found: dict[str, Any], alone: Alone) -> None:
    expected = dict(alone[2].named_weights())
    assert list(found["weights"]) == list(expected)
    assert all(torch.allclose(found["weights"][n], expected[n], atol=1e-5) for n in expected)


def test_the_ranks_together_compute_the_reference_of_the_weights_that_the_engines_get(
    found: dict[str, Any], tied: bool, alone: Alone
) -> None:
    """Again after later steps: FSDP may not keep the weights that an earlier one gathered."""
    first = Learner(new_rank(model(tied, seed=7), TRAIN))
    restore(first, 1, found["state"])
    assert torch.allclose(found["reference"], held_logprobs(first), atol=1e-5)
    now = found["reference of these weights"]
    assert torch.allclose(now, held_logprobs(alone[2]), atol=1e-5)
    assert not torch.allclose(now, found["reference"], atol=1e-3)


def test_the_state_is_that_of_one_rank(found: dict[str, Any], case: Case, alone: Alone) -> None:
    expected = {name: t for name, t in alone[1].items() if not name.startswith("rng/")}
    assert found["state"].keys() == {
        *alone[1],
        *(f"rng/{rank}/cpu" for rank in range(1, case.ranks)),
    }
    assert all(torch.allclose(found["state"][n], t, atol=1e-5) for n, t in expected.items())


@pytest.mark.parametrize("of", ["weights again", "weights of offloaded ranks"])
def test_restored_or_offloaded_ranks_repeat_steps_exactly(found: dict[str, Any], of: str) -> None:
    assert all(torch.equal(weight, found[of][name]) for name, weight in found["weights"].items())


def test_ranks_that_fetch_samples_train_as_given_ones(found: dict[str, Any]) -> None:
    weights, fetched = found["weights of given"], found["weights of fetched"]
    assert all(torch.equal(weights[name], fetched[name]) for name in weights)
    for given, seen in zip(found["given"], found["fetched"], strict=True):
        of_time = {"train/compute_s", "train/tflops"}
        assert {k: v for k, v in seen.items() if k not in of_time} == {
            k: v for k, v in given.items() if k not in of_time
        }


def test_the_first_rank_fetches_its_own_samples_only(found: dict[str, Any], case: Case) -> None:
    every = [s.rollout.uid for batch in BATCHES for s in batch if len(s.rollout.response_ids)]
    own = found["of the first rank"]
    assert len(set(own)) < len(set(every))
    assert len(own) <= len(every) * case.context_parallel / case.ranks + len(BATCHES)


def test_one_rank_goes_on_from_two(found: dict[str, Any], tied: bool, alone: Alone) -> None:
    learner = Learner(new_rank(model(tied, seed=7), TRAIN))
    restore(learner, 1, found["state"])
    trained(learner, BATCHES[1:])
    expected = dict(alone[2].named_weights())
    weights = dict(learner.named_weights())
    assert all(torch.allclose(weights[n], expected[n], atol=1e-5) for n in expected)


def test_the_model_that_is_saved_is_whole_and_has_no_weight_twice(
    folder: Path, found: dict[str, Any], tied: bool
) -> None:
    from safetensors import safe_open
    from transformers import AutoModelForCausalLM

    with safe_open(folder / "model" / "model.safetensors", "pt") as file:
        assert ("lm_head.weight" in file.keys()) is not tied  # noqa: SIM118
    saved = AutoModelForCausalLM.from_pretrained(folder / "model", dtype=torch.float32)
    weights = found["weights again"]
    own = dict(saved.named_parameters())
    assert own.keys() == weights.keys()
    assert all(torch.equal(own[name], weights[name]) for name in own)


def test_in_bfloat16_the_loss_is_that_of_one_rank_and_its_inputs_are_not_rounded(half: Any) -> None:
    one, two = half
    assert math.isclose(two["loss/total"], one["loss/total"], rel_tol=0.03)
    assert math.isclose(two["loss/teacher_topk_mass"], one["loss/teacher_topk_mass"], rel_tol=1e-6)
    assert math.isclose(two["loss/total"], two["loss/distillation"], rel_tol=1e-5)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_every_rank_checks_the_path_that_trains(dtype: str, tmp_path: Path) -> None:
    """The first passes and trains; the kernel of the second differs from eager attention."""

    def rank_of(spec: RankSpec | None) -> Rank:
        made = families.mistral(window=64)
        exact = check_student(made)
        register_kernel("packed_test", double_scale if spec.rank else reference)
        made.set_attn_implementation("packed_test")
        rank = new_rank(made, TRAIN.model_copy(update={"dtype": dtype}), mesh=mesh_of(spec))
        with pytest.raises(StageError) if spec.rank else nullcontext() as error:
            check_placed(rank.student, exact)
        if error is not None:
            (tmp_path / "refused").write_text(error.value.cause)
        return rank

    loss = on_ranks(RANKS, rank_of, lambda of: of.train_batch(BATCHES[0]).metrics["loss/total"])
    assert math.isfinite(loss)
    assert "of MistralForCausalLM differ from the model's own" in (tmp_path / "refused").read_text()
