"""The learner: independence of the split, steps that help, steps that are refused."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from async_opd.config.sections.loss import ForwardKLConfig
from async_opd.config.sections.train import TrainConfig
from async_opd.core.batch import cut
from async_opd.core.errors import StageError
from async_opd.core.samples import Sample
from tests.trainer.models import kept_gradients, random_sample, tiny_model
from tests.trainer.oracle import config_of, every_loss
from trainer.follower import Follower
from trainer.learner import Learner
from trainer.losses import build_objective, chunked
from trainer.notes import note
from trainer.rank import BackwardResult, Rank
from trainer.rank_group import SingleRank

SIZES = [5, 1, 0, 9, 3, 7]


def samples(k: int = 6) -> list[Sample]:
    return [random_sample(index, size, k=k) for index, size in enumerate(SIZES)]


def rank_of(kind: str = "forward_kl", seed: int = 0, **train: Any) -> Rank:
    config = TrainConfig.model_validate({"lr": 1e-3, "warmup_steps": 0, "steps": 50, **train})
    objective = build_objective(config_of(kind))
    return Rank(tiny_model(seed), objective, config, torch.device("cpu"))


def learner(seed: int = 0, kind: str = "forward_kl", **train: Any) -> Learner:
    return Learner(rank_of(kind, seed, **train))


def gradients(batch: list[Sample], kind: str, budget: int, **train: Any) -> Any:
    made = rank_of(kind, tokens_per_micro_batch=budget, **train)
    kept = kept_gradients(made)
    Learner(made).train_batch(batch)
    return kept


@pytest.mark.parametrize("kind", every_loss())
@pytest.mark.parametrize("budget", [1, 12, 20])
def test_the_gradient_does_not_depend_on_the_split_into_micro_batches(
    kind: str, budget: int
) -> None:
    batch = samples(k=6)
    whole, split = gradients(batch, kind, 10**6), gradients(batch, kind, budget)
    assert all(torch.allclose(whole[name], split[name], atol=1e-6) for name in whole)


def test_the_gradient_does_not_depend_on_the_chunks_of_logits(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    whole = gradients(samples(), "forward_kl", 10**6)
    monkeypatch.setattr(chunked, "CHUNK_BYTES", {"cpu": 2 * 32 * 4})
    split = gradients(samples(), "forward_kl", 10**6)
    assert all(torch.allclose(whole[name], split[name], atol=1e-6) for name in whole)


def test_the_loss_is_a_mean_over_response_tokens() -> None:
    batch = samples()
    one = learner().train_batch(batch).metrics["loss/total"]
    two = learner().train_batch([*batch, *batch]).metrics["loss/total"]
    assert one == pytest.approx(two, rel=1e-5)


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


def test_the_next_report_has_what_was_noted_once() -> None:
    made = learner()
    note("compiled")
    assert made.train_batch(samples()).notes == ("compiled",)
    assert made.train_batch(samples()).notes == ()


def test_two_equal_runs_give_equal_weights() -> None:
    first, second = learner(), learner()
    for _ in range(3):
        first.train_batch(samples())
        second.train_batch(samples())
    for a, b in zip(first.model.parameters(), second.model.parameters(), strict=True):
        assert torch.equal(a, b)


def poisoned() -> list[Sample]:
    batch = samples()
    batch[0].scores.logprobs[0, 0] = np.nan
    return batch


def test_a_loss_that_is_not_finite_stops_with_the_uids() -> None:
    with pytest.raises(StageError, match="p0/0"):
        learner().train_batch(poisoned())


def test_a_step_that_is_not_finite_is_left_out_if_the_config_says_so() -> None:
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


def test_sampled_token_scores_are_refused_by_forward_kl() -> None:
    with pytest.raises(ValueError, match="needs a top-k support"):
        learner().train_batch(samples(k=0))


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
def test_the_loss_is_that_of_the_response_tokens_alone(
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


def test_a_batch_without_response_tokens_is_a_step() -> None:
    made = learner(warmup_steps=4)
    made.train_batch([random_sample(0, 0, k=6)])
    assert made.train_batch(samples()).metrics["train/lr"] == pytest.approx(0.5e-3)


def test_published_weights_are_float32_on_a_cpu() -> None:
    assert {weight.dtype for _, weight in learner().named_weights()} == {torch.float32}


def test_published_weights_are_those_after_the_step() -> None:
    made = learner()
    made.train_batch(samples())
    state = made.model.state_dict()
    assert all(torch.equal(weight, state[name]) for name, weight in made.named_weights())


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


def test_gradients_are_clipped_to_the_norm() -> None:
    kept = gradients(samples(), "forward_kl", 10**6, max_grad_norm=1e-2)
    squares = [gradient.square().sum() for gradient in kept.values()]
    assert float(torch.stack(squares).sum().sqrt()) == pytest.approx(1e-2, rel=1e-3)


def test_the_reported_gradient_norm_is_the_one_before_clipping() -> None:
    free, bound = (learner(max_grad_norm=norm).train_batch(samples()) for norm in (1e9, 1e-2))
    assert bound.metrics["train/grad_norm"] == free.metrics["train/grad_norm"]


class Watched(SingleRank):
    """Records that the ranks are marked broken."""

    broken = False

    def __init__(self) -> None:
        self.dispatched: list[str] = []

    def dispatch(
        self, method: str, arguments: Sequence[tuple[Any, ...]]
    ) -> Callable[[], list[Any]]:
        self.dispatched.append(method)
        return list

    def mark_broken(self) -> None:
        self.broken = True


def of_a_rank_group(rank_group: Watched) -> Learner:
    objective = build_objective(ForwardKLConfig())
    rank = Rank(tiny_model(), objective, TrainConfig(), torch.device("cpu"))
    return Learner(rank, rank_group=rank_group)


def test_an_error_in_the_middle_of_a_step_leaves_the_other_ranks_out_of_step(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    rank_group = Watched()
    made = of_a_rank_group(rank_group)

    def fail(*_: Any) -> None:
        raise RuntimeError("out of memory")

    monkeypatch.setattr(Rank, "backward", fail)
    with pytest.raises(RuntimeError, match="out of memory"):
        made.train_batch(samples())
    assert rank_group.broken


def test_an_error_after_the_gradients_breaks_the_group_and_frees_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    rank_group = Watched()
    made = of_a_rank_group(rank_group)

    def fail(*_: Any) -> None:
        raise KeyError("total")

    monkeypatch.setattr("trainer.learner.step_metrics", fail)
    with pytest.raises(KeyError, match="total"):
        made.train_batch(samples())
    assert rank_group.broken
    assert all(parameter.grad is None for parameter in made.model.parameters())


def test_a_step_that_is_not_finite_frees_all_ranks_gradients_and_leaves_them_in_step() -> None:
    rank_group = Watched()
    with pytest.raises(StageError, match="not a number"):
        of_a_rank_group(rank_group).train_batch(poisoned())
    assert rank_group.dispatched == ["backward", "apply"]
    assert not rank_group.broken


def saving(made: Learner, folder: Path) -> None:
    source = folder / "source"
    tiny_model().save_pretrained(source)
    made.save(str(source), str(folder / "model"))


def test_a_config_that_transformers_does_not_save_leaves_them_in_step(tmp_path: Path) -> None:
    """It is a ValueError, after all weights were gathered."""
    rank_group = Watched()
    made = of_a_rank_group(rank_group)
    made.model.generation_config.temperature = -1.0
    with pytest.raises(ValueError, match="temperature"):
        saving(made, tmp_path)
    assert rank_group.dispatched == ["join_gather"]
    assert not rank_group.broken


def test_a_gather_that_fails_in_an_export_leaves_them_out_of_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rank_group = Watched()
    made = of_a_rank_group(rank_group)

    def fail(*_: Any) -> Any:
        raise RuntimeError("connection closed")
        yield

    monkeypatch.setattr(Rank, "exported", fail)
    with pytest.raises(RuntimeError, match="connection closed"):
        saving(made, tmp_path)
    assert rank_group.broken


def test_a_batch_that_is_refused_leaves_them_in_step() -> None:
    rank_group = Watched()
    with pytest.raises(TypeError, match="several kinds"):
        of_a_rank_group(rank_group).train_batch([*samples(k=0), *samples(k=6)])
    assert not rank_group.broken


class Recorded(SingleRank):
    """Two ranks of which the second computes nothing; what it is sent is kept."""

    ranks = 2

    def __init__(self) -> None:
        self.dispatched: list[tuple[str, Any]] = []

    def dispatch(
        self, method: str, arguments: Sequence[tuple[Any, ...]]
    ) -> Callable[[], list[Any]]:
        self.dispatched.append((method, arguments[0]))
        return lambda: [BackwardResult({}, 0.0) if method == "backward" else None]


def test_another_rank_is_sent_its_parts_of_a_step_in_messages_of_bounded_bytes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    batch = [random_sample(index, 5, k=6) for index in range(8)]
    monkeypatch.setattr("trainer.learner.cut", partial(cut, most=2 * batch[0].nbytes))
    rank_group = Recorded()
    config = TrainConfig.model_validate({"tokens_per_micro_batch": 1})
    objective = build_objective(ForwardKLConfig())
    rank = Rank(tiny_model(), objective, config, torch.device("cpu"))
    Learner(rank, rank_group=rank_group).train_batch(batch)
    assert [method for method, _ in rank_group.dispatched] == ["take", "take", "backward", "apply"]
    assert [len(parts) for method, (*given,) in rank_group.dispatched[:2] for parts in given] == [
        2,
        2,
    ]


async def test_a_follower_computes_all_that_it_has_taken_once() -> None:
    computed: list[list[str]] = []

    class Kept:
        def backward(self, parts: list[str], *given: Any) -> BackwardResult:
            computed.append(parts)
            return BackwardResult({}, 0.0)

    rank: Any = Kept()
    follower = Follower(rank)
    first, second, third = ("one", "two", "three")
    await follower.take([first, second])  # type: ignore[list-item]
    await follower.take([third])  # type: ignore[list-item]
    await follower.backward()
    await follower.backward()
    assert computed == [["one", "two", "three"], []]


async def test_a_follower_computes_the_batch_of_the_number_and_lets_earlier_ones_go() -> None:
    """The next batch is fetched while one is computed; another one may not be trained at all."""
    computed: list[Any] = []

    class Kept:
        def backward(self, parts: Any, *given: Any) -> BackwardResult:
            computed.append(parts)
            return BackwardResult({}, 0.0)

    rank: Any = Kept()
    follower = Follower(rank)
    follower._fetched = {1: ("given up",), 2: ("now",), 3: ("next",)}  # type: ignore[dict-item]
    await follower.backward(2)
    assert computed == [["now"]]
    assert follower._fetched == {3: ("next",)}
