"""The learner: independence of the split, steps that help, steps that are refused."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import cache, partial
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from async_opd.config.sections.train import TrainConfig
from async_opd.core.batch import cut
from async_opd.core.errors import StageError
from async_opd.core.samples import Sample
from tests.trainer.models import kept_gradients, random_sample, samples_of, tiny_model
from tests.trainer.oracle import config_of, every_loss
from trainer.follower import Follower
from trainer.learner import Learner
from trainer.losses import build_objective, chunked
from trainer.notes import note
from trainer.rank import BackwardResult, Rank
from trainer.rank_group import SingleRank
from trainer.student.named_weights import FullWeights
from trainer.student.placed import PlacedStudent

SIZES = [5, 1, 0, 9, 3, 7]


def samples(k: int = 6) -> list[Sample]:
    return [random_sample(index, size, k=k) for index, size in enumerate(SIZES)]


def rank_of(kind: str = "forward_kl", seed: int = 0, **train: Any) -> Rank:
    config = TrainConfig.model_validate({"lr": 1e-3, "warmup_steps": 0, "steps": 50, **train})
    objective = build_objective(config_of(kind))
    return Rank(PlacedStudent(tiny_model(seed), objective, config, torch.device("cpu")))


def learner(seed: int = 0, kind: str = "forward_kl", **train: Any) -> Learner:
    return Learner(rank_of(kind, seed, **train))


def gradients(
    batch: list[Sample], kind: str = "forward_kl", dtype: torch.dtype = torch.float32, **train: Any
) -> dict[str, torch.Tensor]:
    """As the optimizer of a step gets them."""
    made = rank_of(kind, **train)
    made.model.to(dtype)
    kept = kept_gradients(made)
    Learner(made).train_batch(batch)
    return kept


def test_forward_kl_falls() -> None:
    made = learner(lr=1e-2)
    losses = [made.train_batch(samples()).metrics["loss/total"] for _ in range(20)]
    assert losses[-1] < 0.5 * losses[0]


def test_the_policy_gradient_lowers_the_sampled_gap_to_the_teacher() -> None:
    """On fixed tokens that the teacher finds more likely than the student does."""
    made = learner(kind="k1", lr=1e-2)
    batch = [sample for sample in samples(k=0) if len(sample.rollout.response_ids)]
    gaps = [abs(made.train_batch(batch).metrics["loss/k1"]) for _ in range(20)]
    assert gaps[-1] < gaps[0]


def test_a_step_reports_notes_once_and_its_weights_are_published() -> None:
    made = learner()
    note("compiled")
    assert made.train_batch(samples()).notes == ("compiled",)
    assert made.train_batch(samples()).notes == ()
    made.train_batch(samples())
    state = made.model.state_dict()
    assert all(torch.equal(weight, state[name]) for name, weight in made.named_weights())


def poisoned() -> list[Sample]:
    batch = samples()
    batch[0].scores.logprobs[0, 0] = np.nan
    return batch


def test_a_loss_that_is_not_finite_stops_with_the_uids_or_is_left_out() -> None:
    with pytest.raises(StageError, match="p0/0"):
        learner().train_batch(poisoned())
    made = learner(on_nonfinite="skip")
    before = [parameter.clone() for parameter in made.model.parameters()]
    report = made.train_batch(poisoned())
    assert "loss nan" in report.skipped
    assert report.metrics["train/skipped_steps"] == 1
    assert all(torch.equal(a, b) for a, b in zip(before, made.model.parameters(), strict=True))


def test_steps_that_are_left_out_leave_no_trace_in_later_ones() -> None:
    skipping = learner(on_nonfinite="skip", schedule="constant")
    plain = learner(schedule="constant")
    skipping.train_batch(poisoned())
    skipping.train_batch(samples())
    plain.train_batch(samples())
    for a, b in zip(skipping.model.parameters(), plain.model.parameters(), strict=True):
        assert torch.equal(a, b)


def test_a_finite_step_in_between_resets_the_count_of_those_left_out() -> None:
    made = learner(on_nonfinite="skip", max_skipped=1)
    for batch in (poisoned(), samples(), poisoned()):
        made.train_batch(batch)
    with pytest.raises(StageError, match=r"after 1 skipped steps: loss nan.*p0/0"):
        made.train_batch(poisoned())


def weights(made: Learner) -> list[torch.Tensor]:
    return [parameter.detach().clone() for parameter in made.model.parameters()]


def same(one: list[torch.Tensor], other: list[torch.Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


def test_a_refused_batch_has_no_effect_on_the_next_one() -> None:
    refused, untouched = learner(tokens_per_micro_batch=12), learner(tokens_per_micro_batch=12)
    with pytest.raises(StageError):
        refused.train_batch(poisoned())
    for made in (refused, untouched):
        made.train_batch(samples())
    assert same(weights(refused), weights(untouched))


def test_an_error_in_a_later_micro_batch_leaves_no_gradient_behind() -> None:
    batch = samples()
    vars(batch[1].scores)["logprobs"] = np.zeros((1, 5), dtype=np.float32)
    made = learner(tokens_per_micro_batch=12)
    with pytest.raises(ValueError, match="dimension"):
        made.train_batch(batch)
    assert all(parameter.grad is None for parameter in made.model.parameters())


def test_a_token_outside_of_the_students_vocabulary_is_refused_with_its_uid() -> None:
    batch = samples()
    batch[3].scores.ids[2, 1] = 32
    with pytest.raises(
        StageError, match=r"sample p3/0 of teacher t has token 32; the head has 32 rows"
    ):
        learner().train_batch(batch)


@pytest.mark.parametrize("budget", [1, 10**6])
def test_mixed_scores_are_refused_however_they_are_split(budget: int) -> None:
    batch = [random_sample(0, 5, k=6), random_sample(1, 4)]
    with pytest.raises(TypeError, match="several kinds"):
        learner(kind="k1", tokens_per_micro_batch=budget).train_batch(batch)


@pytest.mark.parametrize("field", ["logprobs", "sampled_logprobs"])
def test_a_teacher_score_that_is_not_a_number_is_refused(field: str) -> None:
    batch = samples()
    vars(batch[0].scores)[field][0] = np.nan
    with pytest.raises(StageError, match="not a number"):
        learner().train_batch(batch)


def reference_loss(made: Learner, batch: list[Sample]) -> float:
    """Forward KL with a bucket, one sample and one response token at a time, in Python floats."""
    total, tokens = 0.0, 0
    for sample in batch:
        prompt, response = sample.rollout.prompt.token_ids, sample.rollout.response_ids
        with torch.no_grad():
            ids = torch.from_numpy(np.concatenate([prompt, response])).long()[None]
            table = made.model(ids).logits[0].log_softmax(-1)
        for t in range(len(response)):
            scores = vars(sample.scores)
            p = [math.exp(v) for v in scores["logprobs"][t].tolist()]
            row = table[len(prompt) - 1 + t]
            q = [math.exp(row[i].item()) for i in scores["ids"][t].tolist()]
            pairs = zip([*p, 1 - sum(p)], [*q, 1 - sum(q)], strict=True)
            total += sum(a * math.log(a / b) for a, b in pairs)
            tokens += 1
    return total / tokens


@pytest.mark.parametrize("budget", [1, 12, 10**6])
@pytest.mark.parametrize("chunk", [1, 4, 1024])
def test_only_responses_have_a_loss(
    budget: int, chunk: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(chunked, "CHUNK_BYTES", {"cpu": chunk * 32 * 8})
    made = learner(tokens_per_micro_batch=budget)
    made.model.double()
    expected = reference_loss(made, samples())
    loss = made.train_batch(samples()).metrics["loss/total"]
    assert loss == pytest.approx(expected, rel=1e-6)


def test_a_batch_without_response_tokens_after_a_step_still_changes_nothing() -> None:
    made = learner(weight_decay=0.1)
    made.train_batch(samples())
    before = weights(made)
    made.train_batch([random_sample(0, 0, k=6)])
    assert same(before, weights(made))


def test_a_batch_without_response_tokens_is_a_step_without_a_loss() -> None:
    made = learner(warmup_steps=4)
    assert made.train_batch([random_sample(0, 0, k=6)]).metrics["loss/total"] == 0
    assert made.train_batch(samples()).metrics["train/lr"] == pytest.approx(0.5e-3)


def test_rollout_gap_is_the_mean_distance_to_the_rollout_logprobs() -> None:
    batch = [random_sample(0, 4, k=6)]
    made = learner()
    rollout = batch[0].rollout
    ids = torch.tensor([[*rollout.prompt.token_ids.tolist(), *rollout.response_ids.tolist()]])
    with torch.no_grad():
        table = made.model(ids).logits[0, 2:-1].log_softmax(-1)
    own = table[torch.arange(4), torch.from_numpy(rollout.response_ids).long()].numpy()
    expected = float(np.abs(own - rollout.rollout_logprobs).mean())
    gap = made.train_batch(batch).metrics["loss/rollout_gap"]
    assert gap == pytest.approx(expected, rel=1e-5)


def test_gradients_are_clipped_and_the_norm_before_it_is_reported() -> None:
    kept = gradients(samples(), max_grad_norm=1e-2)
    squares = [gradient.square().sum() for gradient in kept.values()]
    assert float(torch.stack(squares).sum().sqrt()) == pytest.approx(1e-2, rel=1e-3)
    free, bound = (learner(max_grad_norm=norm).train_batch(samples()) for norm in (1e9, 1e-2))
    assert bound.metrics["train/grad_norm"] == free.metrics["train/grad_norm"]


class Watched(SingleRank):
    """Records what is sent to a second rank, which computes nothing; and that ranks are broken."""

    broken = False

    def __init__(self, ranks: int = 1) -> None:
        self.ranks = ranks
        self.sent: list[tuple[str, Any]] = []

    @property
    def dispatched(self) -> list[str]:
        return [method for method, _ in self.sent]

    def dispatch(self, method: str, arguments: Sequence[Any]) -> Callable[[], list[Any]]:
        self.sent += [(method, given) for given in arguments or [()]]
        answer = BackwardResult({}, 0.0) if method == "backward" else None
        return lambda: [answer] * (self.ranks - 1)

    def mark_broken(self) -> None:
        self.broken = True


@pytest.mark.parametrize("place", ["trainer.rank.Rank.backward", "trainer.learner.step_metrics"])
def test_an_error_within_a_step_leaves_the_other_ranks_out_of_step_and_frees_the_gradients(
    place: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    rank_group = Watched()
    made = Learner(rank_of(), rank_group=rank_group)
    monkeypatch.setattr(place, Mock(side_effect=KeyError("out of memory")))
    with pytest.raises(KeyError, match="out of memory"):
        made.train_batch(samples())
    assert rank_group.broken
    assert all(parameter.grad is None for parameter in made.model.parameters())


@pytest.mark.parametrize(
    ("batch", "error", "dispatched"),
    [
        (poisoned(), StageError, ["backward", "apply"]),
        ([*samples(k=0), *samples(k=6)], TypeError, []),
    ],
    ids=["not finite", "of several kinds"],
)
def test_a_refused_batch_breaks_no_rank(
    batch: list[Sample], error: Any, dispatched: list[str]
) -> None:
    """Gradients of all ranks are freed where there are some."""
    rank_group = Watched()
    with pytest.raises(error, match=r"not a number|several kinds"):
        Learner(rank_of(), rank_group=rank_group).train_batch(batch)
    assert (rank_group.dispatched, rank_group.broken) == (dispatched, False)


def saving(made: Learner, folder: Path) -> None:
    source = folder / "source"
    tiny_model().save_pretrained(source)
    made.save(str(source), str(folder / "model"))


def test_a_config_that_transformers_does_not_save_leaves_them_in_step(tmp_path: Path) -> None:
    """It is a ValueError, after all weights were gathered."""
    rank_group = Watched()
    made = Learner(rank_of(), rank_group=rank_group)
    made.model.generation_config.temperature = -1.0
    with pytest.raises(ValueError, match="temperature"):
        saving(made, tmp_path)
    assert rank_group.dispatched == ["join_gather"]
    assert not rank_group.broken


def test_a_failed_gather_breaks_the_ranks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rank_group = Watched()
    made = Learner(rank_of(), rank_group=rank_group)

    def fail(*_: Any) -> Any:
        raise RuntimeError("connection closed")
        yield

    monkeypatch.setattr(FullWeights, "exported", fail)
    with pytest.raises(RuntimeError, match="connection closed"):
        saving(made, tmp_path)
    assert rank_group.broken


def test_another_rank_is_sent_messages_of_bounded_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    batch = [random_sample(index, 5, k=6) for index in range(8)]
    monkeypatch.setattr("trainer.batches.shares.cut", partial(cut, most=2 * batch[0].nbytes))
    rank_group = Watched(2)
    Learner(rank_of(tokens_per_micro_batch=1), rank_group=rank_group).train_batch(batch)
    assert rank_group.dispatched == ["take", "take", "backward", "apply"]
    assert [len(parts) for _, (parts,) in rank_group.sent[:2]] == [2, 2]


class Kept:
    """A rank that notes what it computes."""

    def __init__(self) -> None:
        self.computed: list[list[str]] = []

    def backward(self, parts: list[str], *given: Any) -> BackwardResult:
        self.computed.append(parts)
        return BackwardResult({}, 0.0)


async def test_a_follower_computes_all_that_it_has_taken_once() -> None:
    rank: Any = Kept()
    follower: Any = Follower(rank)
    await follower.take(["one", "two"])
    await follower.take(["three"])
    await follower.backward()
    await follower.backward()
    assert rank.computed == [["one", "two", "three"], []]


async def test_a_follower_computes_the_batch_of_the_number_and_lets_earlier_ones_go() -> None:
    """The next batch is fetched while one is computed; another one may not be trained at all."""
    rank: Any = Kept()
    follower: Any = Follower(rank)
    follower._fetched = {1: ("given up",), 2: ("now",), 3: ("next",)}
    for number in (2, 3):
        await follower.backward(number)
    assert rank.computed == [["now"], ["next"]]
    with pytest.raises(KeyError):
        await follower.backward(1)


# ── any split into micro-batches, in any order, gives the same gradient ────────────────────────

SPLIT = samples_of(5, 1, 0, 9, 3)


@cache
def unsplit(kind: str, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    return gradients(SPLIT, kind, dtype, tokens_per_micro_batch=10**6, max_grad_norm=1e9)


@pytest.mark.parametrize("kind", every_loss())
@pytest.mark.parametrize(("dtype", "atol"), [(torch.float64, 1e-10), (torch.float32, 1e-5)])
@settings(max_examples=3, deadline=None)
@given(budget=st.integers(1, 40), order=st.permutations(range(len(SPLIT))))
def test_any_split_has_the_same_gradient(
    kind: str, dtype: torch.dtype, atol: float, budget: int, order: list[int]
) -> None:
    train = {"tokens_per_micro_batch": budget, "max_grad_norm": 1e9}
    split = gradients([SPLIT[index] for index in order], kind, dtype, **train)
    expected = unsplit(kind, dtype)
    assert all(torch.allclose(expected[name], split[name], atol=atol) for name in expected)
