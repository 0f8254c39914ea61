"""What a step reports of its batch, and how it names one that it refuses."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from async_opd.config.sections.train import TrainConfig
from async_opd.core.errors import StageError
from async_opd.core.samples import EpisodeFacts, Sample
from async_opd.core.scores import SampledLogprobs
from tests.conftest import make_rollout
from tests.sequences import Parts, sequence
from tests.trainer.models import new_rank, random_sample, tiny_model
from tests.trainer.oracle import config_of
from trainer import rank
from trainer.batches.batch_metrics import batch_metrics, repetition
from trainer.batches.packing import LATER_TURNS, SEPARATE_TURNS, Packed, pack
from trainer.learner import CPU_ROW_TOKENS, Learner
from trainer.losses import build_objective
from trainer.losses.report import Metrics, token_sums
from trainer.rank import Rank
from trainer.student.placed import PlacedStudent

SIZES = [5, 1, 0, 9, 3, 7]


def samples(prompt: int = 3) -> list[Sample]:
    return [random_sample(index, size, k=6, prompt=prompt) for index, size in enumerate(SIZES)]


def learner(**train: Any) -> Learner:
    config = TrainConfig.model_validate({"warmup_steps": 0, **train})
    return Learner(new_rank(tiny_model(), config))


def test_a_step_reports_its_tokens_and_lengths() -> None:
    metrics = learner().train_batch(samples()).metrics
    assert (metrics["train/tokens"], metrics["train/empty_responses"]) == (3 * 6 + 25, 1)
    assert metrics["train/std_response_tokens"] == pytest.approx(np.std(SIZES))


def of_sources() -> list[Sample]:
    """Samples of the sources a and b in turn, which teachers c and d scored; a's are graded."""
    return [
        replace(
            sample,
            rollout=replace(
                sample.rollout,
                prompt=replace(
                    sample.rollout.prompt, data_source="ab"[index % 2], teacher="cd"[index // 3]
                ),
                finish_reason="length" if index == 0 else "stop",
                reward=None if index % 2 else float(index == 2),
            ),
        )
        for index, sample in enumerate(samples())
    ]


def test_each_source_has_its_lengths_truncations_and_grades() -> None:
    found = batch_metrics([sample.header for sample in of_sources()], 100)
    for source, sizes in {"a": SIZES[::2], "b": SIZES[1::2]}.items():
        assert found[f"source/{source}/mean_response_tokens"] == pytest.approx(np.mean(sizes))
    assert found["source/a/truncated_share"] == pytest.approx(1 / 3)
    assert found["source/b/truncated_share"] == 0
    assert found["source/a/accuracy"] == pytest.approx(1 / 3)
    assert "source/b/accuracy" not in found


def test_tokens_are_summed_where_the_loss_is_computed(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a GPU, owners left in host memory would be an error; ``to`` copies nothing on a CPU."""
    there: list[Packed] = []
    summed: list[torch.Tensor | None] = []

    def moved(packed: Packed, device: torch.device) -> Packed:
        tokens = packed.tokens
        there.append(replace(packed, tokens=replace(tokens, owners=tokens.owners.clone())))
        return there[-1]

    def sums(values: Metrics, owners: torch.Tensor | None, names: Any) -> Metrics:
        summed.append(owners)
        return token_sums(values, owners, names)

    monkeypatch.setattr(Packed, "to", moved)
    monkeypatch.setattr(rank, "token_sums", sums)
    learner().train_batch(samples())
    assert [id(owners) for owners in summed] == [id(packed.tokens.owners) for packed in there]


def test_each_source_and_each_teacher_has_the_loss_of_its_own_tokens() -> None:
    batch = of_sources()
    metrics = learner().train_batch(batch).metrics
    for kind, part in (("source/a", batch[::2]), ("teacher/d", batch[3:])):
        alone = learner().train_batch(part).metrics
        assert metrics[f"{kind}/loss"] == pytest.approx(alone["loss/distillation"])
        tokens = sum(len(one.rollout.response_ids) for one in part)
        assert metrics[f"{kind}/token_share"] == pytest.approx(tokens / sum(SIZES))


def of_turns(*lengths: int, seed: int = 1) -> Sample:
    """An episode with turns of these lengths."""
    parts: Parts = [part for n in lengths for part in (("student", n), ("tool", 2))]
    rollout = sequence(f"e{seed}/0", parts, seed=seed, media=False)
    episode = EpisodeFacts(len(lengths), calls=seed, malformed=1, tool_s=0.5, cut_tokens=7)
    size = sum(lengths)
    logprobs = -np.random.default_rng(seed).random(size).astype(np.float32)
    return Sample(replace(rollout, episode=episode), SampledLogprobs(logprobs))


def test_the_facts_of_episodes_are_means_over_them() -> None:
    batch = [of_turns(3, 1), of_turns(*[1] * 5, seed=4), random_sample(0, 3)]
    found = batch_metrics([sample.header for sample in batch], 100)
    expected = {"turns": 3.5, "calls": 2.5, "malformed": 1, "unknown": 0, "tool_s": 0.5}
    of_episodes = {k: v for k, v in found.items() if k.startswith("episode/")}
    assert of_episodes == {f"episode/{k}": v for k, v in {**expected, "cut_tokens": 7}.items()}


def test_a_batch_without_episodes_has_none_of_their_metrics() -> None:
    metrics = learner().train_batch(samples()).metrics
    assert not [key for key in metrics if key.startswith(("episode/", "turn/"))]


def test_each_turn_of_episodes_has_the_loss_and_gap_of_its_own_tokens() -> None:
    """Those of samples without an environment count in none; later turns count together."""
    batch = [of_turns(3, 1), of_turns(*[2] * (SEPARATE_TURNS + 2), seed=4), random_sample(0, 3)]
    settings = TrainConfig(warmup_steps=0, dtype="float32")
    objective = build_objective(config_of("k1"))
    rank = Rank(PlacedStudent(tiny_model(), objective, settings, torch.device("cpu")))
    metrics = Learner(rank).train_batch(batch).metrics
    packed = pack(batch)
    given = {"input_ids": packed.input_ids, "position_ids": packed.position_ids}
    with torch.no_grad():
        logits = tiny_model()(**given, use_cache=False).logits
    log_q = logits[0, packed.rows].log_softmax(-1).gather(-1, packed.tokens.targets[:, None])[:, 0]
    gaps = (log_q - packed.tokens.teacher_logprobs)[:-3].tolist()
    turns = [0, 0, 0, 1, *np.repeat(range(SEPARATE_TURNS), 2), *[SEPARATE_TURNS] * 4]
    for turn in range(SEPARATE_TURNS + 1):
        own = [gap for gap, at in zip(gaps, turns, strict=True) if at == turn]
        name = f"turn/{turn + 1 if turn < SEPARATE_TURNS else LATER_TURNS}"
        assert metrics[f"{name}/gap"] == pytest.approx(np.mean(own), abs=1e-5)
        assert metrics[f"{name}/token_share"] == pytest.approx(len(own) / len(turns))
        assert f"{name}/loss" in metrics


def test_rows_are_within_the_budget_and_on_a_cpu_shorter() -> None:
    made = learner(tokens_per_micro_batch=9)
    assert made.train_batch(samples()).metrics["train/over_budget"] == 2
    batch = [random_sample(index, 1, k=6, prompt=40) for index in range(30)]
    metrics = learner(tokens_per_micro_batch=10**6).train_batch(batch).metrics
    assert metrics["train/micro_batches"] == -(-41 * 30 // CPU_ROW_TOKENS)


def test_a_refused_batch_is_named_in_full() -> None:
    batch = samples()
    vars(batch[0].scores)["logprobs"][0, 0] = np.nan
    with pytest.raises(StageError) as caught:
        learner().train_batch(batch)
    assert all(sample.rollout.uid in caught.value.cause for sample in batch)


def share_of(ids: list[int]) -> float:
    rollout = replace(make_rollout(tokens=len(ids)), continuation=np.array(ids, dtype=np.int32))
    return repetition(rollout)


@pytest.mark.parametrize(
    ("ids", "share"),
    [(list(range(50)), 0), ([1, 2, 3] * 100, 1 - 3 / 293), ([7] * 8, 0)],
    ids=["no repetition", "a loop", "too short"],
)
def test_the_share_of_a_response_that_repeats(ids: list[int], share: float) -> None:
    assert share_of(ids) == pytest.approx(share)
