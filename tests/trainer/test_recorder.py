"""Records of tokens have what the loss computed, of every sample that the config chooses."""

from __future__ import annotations

import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from pydantic import TypeAdapter

from async_opd.config.sections.loss import Loss, RewardConfig
from async_opd.config.sections.train import TrainConfig
from async_opd.core.samples import Sample, VersionSpan
from async_opd.core.scores import HiddenStates, SampledLogprobs
from async_opd.microscope import (
    CLAMPS,
    COLUMNS,
    MICROSCOPE,
    RecordWriter,
    SampleRecord,
    records,
)
from tests.sequences import sequence
from tests.trainer.models import VOCABULARY, random_sample, tiny_model
from tests.trainer.oracle import DIVERGENCES, config_of, every_loss
from tests.trainer.ranks import CPU, mesh_of, on_ranks
from trainer.batches.token_weights import TokenWeighting
from trainer.learner import Learner
from trainer.losses import build_objective, chunked
from trainer.losses.teacher_heads import TeacherHead
from trainer.notes import drain_notes
from trainer.rank import Rank
from trainer.rank_group import RankSpec
from trainer.recorder import Recorder
from trainer.student.placed import PlacedStudent

SIZES = [5, 1, 0, 9, 3, 7]
VARIED: dict[str, dict[str, Any]] = {
    "reverse_kl": {"clamp": 0.5, "importance_cap": 1.1},
    "jsd": {"tail": "ignore"},
    "k1": {"clamp": 0.5},
    "k2": {"reduction": "seq_mean_token_mean", "weight": 0.5},
    "k3": {"teacher_floor": -2.0},
}


class Numbers:
    """A tokenizer whose texts are ids."""

    def decode(self, ids: list[int]) -> str:
        return " ".join(map(str, ids))

    def token(self, token: int) -> str:
        return f" {token}"


def recorder(folder: Path, rank: int = 0, share: float = 1.0, top_k: int = 3) -> Recorder:
    writer = RecordWriter(folder / MICROSCOPE, rank, 1 << 20)
    return Recorder(writer, seed=0, share=share, top_k=top_k, speller=Numbers)


FORWARD = {"kind": "forward_kl"}


def learner_of(
    to: Path | Recorder | None,
    loss: dict[str, Any] = FORWARD,
    reward: RewardConfig | None = None,
    heads: Any = None,
    **train: Any,
) -> Learner:
    config: Any = TypeAdapter(Loss).validate_python(loss)
    rank = rank_of(config, reward, None, heads, **train)
    rank.recorder = recorder(to) if isinstance(to, Path) else to
    return Learner(rank, TokenWeighting.of(config, reward, 16))


def rank_of(
    loss: Any, reward: RewardConfig | None, spec: RankSpec | None, heads: Any = None, **train: Any
) -> Rank:
    settings = {"lr": 1e-3, "warmup_steps": 0, "steps": 50, "dtype": "float32", **train}
    config, objective = TrainConfig.model_validate(settings), build_objective(loss, reward)
    return Rank(PlacedStudent(tiny_model(), objective, config, CPU, heads, mesh=mesh_of(spec)))


def batch(k: int = 6) -> list[Sample]:
    made = []
    for index, size in enumerate(SIZES):
        sample = random_sample(index, size, k=k)
        spans = (VersionSpan(1, 0, 2), VersionSpan(3, 2, size)) if size > 2 else None
        rollout = sample.rollout
        rollout = replace(rollout, version_spans=spans) if spans else rollout
        made.append(replace(sample, rollout=replace(rollout, reward=float(index % 2))))
    return made


def recorded(folder: Path, learner: Learner) -> dict[str, SampleRecord]:
    learner.compared("flush_records")
    return {one.uid: one for one in records(folder)}


def total(found: dict[str, SampleRecord], column: str) -> float:
    return float(sum(one[column].sum(dtype=np.float64) for one in found.values()))


@pytest.mark.parametrize("kind", every_loss())
def test_the_recorded_losses_of_a_step_are_the_logged_ones(kind: str, tmp_path: Path) -> None:
    loss = config_of(kind, **VARIED.get(kind, {})).model_dump()
    made = learner_of(tmp_path, loss, tokens_per_micro_batch=12)
    metrics = made.train_batch(batch(6 if kind in DIVERGENCES else 0)).metrics
    found = recorded(tmp_path, made)
    tokens = sum(map(len, found.values()))
    assert tokens == sum(SIZES)
    assert total(found, "total") == pytest.approx(metrics["loss/total"], rel=1e-5)
    mean = total(found, "distillation") / tokens
    assert mean == pytest.approx(metrics["loss/distillation"], rel=1e-5)
    gap = sum(one.gap.sum() for one in found.values()) / tokens
    assert gap == pytest.approx(metrics["loss/k1"], rel=1e-4)
    for one in found.values():
        weights = one.columns.get("importance_weight", 1.0)
        assert np.allclose(one["total"], one.weight * weights * one["distillation"], atol=1e-6)
    assert metrics["microscope/samples"] == 5
    for key, bit in CLAMPS.items():
        if f"loss/{key}" in metrics:
            share = sum(((one["clamps"] & bit) > 0).sum() for one in found.values()) / tokens
            assert share == pytest.approx(metrics[f"loss/{key}"])


def test_with_a_reward_both_losses_and_the_advantage_are_recorded(tmp_path: Path) -> None:
    samples = [
        replace(one, rollout=replace(one.rollout, uid=f"p/{index}"))
        for index, one in enumerate(batch())
    ]
    made = learner_of(tmp_path, FORWARD, RewardConfig(grader="exact", weight=0.5))
    metrics = made.train_batch(samples).metrics
    found = recorded(tmp_path, made)
    assert total(found, "total") == pytest.approx(metrics["loss/total"], rel=1e-5)
    for one in found.values():
        assert one.advantage is not None
        assert one.reward in (0.0, 1.0)
        parts = one.weight * one["distillation"] + one.reward_weight * one["surrogate"]
        assert np.allclose(one["total"], parts, atol=1e-6)


def test_the_log_probabilities_are_those_of_the_student_before_the_step(tmp_path: Path) -> None:
    made = learner_of(tmp_path, tokens_per_micro_batch=12)
    made.version = 4
    made.train_batch(batch())
    model = tiny_model().eval()
    found = recorded(tmp_path, made)
    for sample in batch():
        rollout = sample.rollout
        if not len(rollout.response_ids):
            assert rollout.uid not in found
            continue
        one = found[rollout.uid]
        with torch.no_grad():
            ids = torch.from_numpy(rollout.token_ids.astype(np.int64))[None]
            logq = model(ids).logits[0, 2:-1].log_softmax(-1)
        top = logq.topk(3)
        chosen = logq.numpy()[np.arange(len(one)), one["token"]]
        assert one["token"].tolist() == rollout.response_ids.tolist()
        assert np.allclose(one["student_logprob"], chosen, atol=1e-5)
        assert np.allclose(one["student_logprobs"], top.values, atol=1e-5)
        assert (one["student_ids"] == top.indices.numpy()).all()
        assert (one["support_ids"] == sample.scores.ids[:, :3]).all()
        support = np.take_along_axis(logq.numpy(), one["support_ids"].astype(np.int64), 1)
        assert np.allclose(one["support_student_logprobs"], support, atol=1e-5)
        teachers = sample.scores.logprobs[:, :3]
        assert np.allclose(one["support_teacher_logprobs"], teachers)
        assert np.allclose(one["rollout_logprob"], rollout.rollout_logprobs)
        assert one["position"].tolist() == list(range(len(one)))
        assert one["version"].tolist() == [1, 1, 3, 3, 3, 3, 3, 3, 3][: len(one)] or len(one) == 1
        assert one.staleness == 4 - rollout.oldest_version
        assert one.text(int(one["token"][0])) == f" {one['token'][0]}"
        assert one.prompt == Numbers().decode(rollout.prompt.token_ids.tolist())


def test_of_a_vocabulary_the_teachers_best_tokens_are_recorded(tmp_path: Path) -> None:
    teacher = tiny_model(3)
    weight = teacher.lm_head.weight.detach()
    heads = {"t": TeacherHead("t", weight)}
    states = [
        torch.randn(size, weight.shape[1], generator=torch.manual_seed(size)) for size in SIZES
    ]
    samples = [
        replace(one, scores=HiddenStates(state.numpy(), "float32"))
        for one, state in zip(batch(), states, strict=True)
    ]
    loss = {"kind": "forward_kl", "support": "full_vocab"}
    made = learner_of(tmp_path, loss, heads=heads)
    made.train_batch(samples)
    found = recorded(tmp_path, made)
    for sample, state in zip(samples, states, strict=True):
        if len(state):
            top = (state @ weight.T).log_softmax(-1).topk(3)
            one = found[sample.rollout.uid]
            assert (one["support_ids"] == top.indices.numpy()).all()
            assert np.allclose(one["support_teacher_logprobs"], top.values, atol=1e-4)


def test_splits_do_not_change_a_record(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = learner_of(tmp_path / "whole")
    made.train_batch(batch())
    monkeypatch.setattr(chunked, "CHUNK_BYTES", {"cpu": 2 * VOCABULARY * 4})
    split = learner_of(tmp_path / "split", tokens_per_micro_batch=12)
    split.train_batch(batch())
    assert_equal(recorded(tmp_path / "whole", made), recorded(tmp_path / "split", split))


def assert_equal(ones: dict[str, SampleRecord], others: dict[str, SampleRecord]) -> None:
    assert ones.keys() == others.keys()
    for uid, one in ones.items():
        assert one.columns.keys() == others[uid].columns.keys() <= COLUMNS.keys()
        for name, column in one.columns.items():
            assert np.allclose(column, others[uid][name], atol=1e-5), name


@pytest.mark.slow
@pytest.mark.parametrize("sharing", [1, 2])
def test_two_ranks_record_what_one_does(sharing: int, tmp_path: Path) -> None:
    def of(spec: RankSpec | None) -> Rank:
        rank = rank_of(config_of("forward_kl"), None, spec, ranks=2, context_parallel=sharing)
        rank.recorder = recorder(tmp_path / "two", spec.rank)
        return rank

    def step(made: Learner) -> dict[str, float]:
        metrics = made.train_batch(batch()).metrics
        made.compared("flush_records")
        return metrics

    metrics = on_ranks(2, of, step)
    alone = learner_of(tmp_path / "one")
    alone.train_batch(batch())
    two = {one.uid: one for one in records(tmp_path / "two")}
    assert_equal(recorded(tmp_path / "one", alone), two)
    assert metrics["microscope/samples"] == 5


def test_the_share_that_is_recorded_does_not_depend_on_the_batch(tmp_path: Path) -> None:
    made = learner_of(recorder(tmp_path, share=0.3))
    first, second = batch()[:4], batch()[2:]
    for samples in (first, second, first[::-1]):
        made.train_batch(samples)
        made.compared("flush_records")
    uids = [{one.uid for one in records(tmp_path, [step])} for step in (1, 2, 3)]
    both = {one.rollout.uid for one in first} & {one.rollout.uid for one in second}
    assert uids[0] == uids[2]
    assert uids[0] & both == uids[1] & both
    assert 0 < len(uids[0] | uids[1]) < 5


def test_a_step_that_is_not_finite_is_recorded_with_its_reason(tmp_path: Path) -> None:
    made = learner_of(tmp_path, on_nonfinite="skip")
    poisoned = batch()
    poisoned[0].scores.logprobs[0, 0] = np.nan
    made.train_batch(poisoned)
    one = recorded(tmp_path, made)["p0/0"]
    assert "loss nan" in one.skipped
    assert np.isnan(one["distillation"]).tolist() == [True, *[False] * 4]


def test_a_failed_step_is_in_no_record(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    own = recorder(tmp_path)
    made = learner_of(own, tokens_per_micro_batch=12)
    take, calls = own.take, list[int]()

    def failing(*given: Any) -> None:
        take(*given)
        calls.append(1)
        if len(calls) == 2:
            raise RuntimeError("the GPU is gone")

    monkeypatch.setattr(own, "take", failing)
    with pytest.raises(RuntimeError):
        made.train_batch(batch())
    assert made.train_batch(batch()).metrics["microscope/samples"] == 5


@pytest.mark.parametrize(("first", "removed"), [(False, 0), (True, 5)])
def test_one_sharing_rank_counts_what_is_left_out(
    first: bool, removed: int, tmp_path: Path
) -> None:
    writer = RecordWriter(tmp_path / MICROSCOPE, 0, 1 << 20, stride=2)  # no record of step 1
    own = Recorder(writer, seed=0, share=1.0, top_k=3, speller=Numbers)
    own.first = first
    made = learner_of(own)
    assert made.train_batch(batch()).metrics["microscope/removed"] == removed


def test_an_error_of_writing_is_noted_once_and_ends_no_step(tmp_path: Path) -> None:
    (tmp_path / MICROSCOPE).touch()  # where the folder would be
    made = learner_of(tmp_path)
    noted = []
    for _ in range(3):
        noted += made.train_batch(batch()).notes
        made.compared("flush_records")
    lost = made.train_batch(batch()).metrics["microscope/lost"]
    made.compared("flush_records")
    assert lost == 15
    assert len([*noted, *drain_notes()]) == 1
    assert "records of step 1 are lost: FileExistsError" in noted[0]


def test_a_step_whose_writer_is_behind_is_lost_and_counted(tmp_path: Path) -> None:
    disk = threading.Event()

    class Slow(Numbers):
        def decode(self, ids: list[int]) -> str:
            assert disk.wait(30)
            return super().decode(ids)

    writer = RecordWriter(tmp_path / MICROSCOPE, 0, 1 << 20)
    made = learner_of(Recorder(writer, seed=0, share=1.0, top_k=3, speller=Slow))
    lost = [made.train_batch(batch()).metrics["microscope/lost"] for _ in range(2)]
    disk.set()
    assert lost == [0, 5]


def test_without_a_share_nothing_is_recorded_and_no_metric_is_there(tmp_path: Path) -> None:
    report = learner_of(None).train_batch(batch())
    assert not [key for key in report.metrics if key.startswith("microscope/")]
    assert not {"loss/student_logprob", "loss/teacher_logprob"} & report.metrics.keys()


def test_recording_changes_no_bit_of_a_step(tmp_path: Path) -> None:
    with_, without = (learner_of(f) for f in (tmp_path, None))
    for made in (with_, without):
        made.train_batch(batch())
    pairs = zip(with_.model.parameters(), without.model.parameters(), strict=True)
    assert all(torch.equal(a, b) for a, b in pairs)


def test_an_episode_has_its_turns_with_the_context_before_each(tmp_path: Path) -> None:
    """Of a new segment its prompt alone; of the first turn what follows the rollout's prompt."""
    after = [
        ("student", 2),
        ("tool", 3),
        ("student", 1),
        ("user", 1),
        ("prompt", 4),
        ("student", 2),
    ]
    rollout = sequence("p/0", after, top_k=2, seed=1, media=False)
    scores = SampledLogprobs(np.full(5, -1.0, np.float32))
    made = learner_of(tmp_path, {"kind": "k1"})
    made.train_batch([Sample(rollout, scores), random_sample(0, 3)])
    found = recorded(tmp_path, made)
    ids = [str(one) for one in rollout.token_ids.tolist()]
    expected = [(0, 0, ""), (2, 0, " ".join(ids[5:8])), (3, 1, " ".join(ids[10:14]))]
    assert list(found["p/0"].turns) == expected
    assert [list(rows) for _, rows in found["p/0"].by_turn()] == [[0, 1], [2], [3, 4]]
    (other,) = (one for uid, one in found.items() if uid != "p/0")
    assert other.turns == ()
    assert other.by_turn() == [("", range(3))]
