"""Sequences of several spans: loss and gradients are those of their rows, computed one by one.

The oracle runs each segment alone, unpacked, in float64; it takes one sampled token after the
other, the row before it, and the formula of the objective.
"""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from async_opd.config.sections.loss import RewardConfig, score_kind
from async_opd.config.sections.train import TrainConfig
from async_opd.core.samples import Rollout, Sample
from async_opd.core.scores import CandidateLogprobs, HiddenStates, SampledLogprobs, Scores, TopK
from tests.sequences import Parts, parts, sampled_positions, sequence
from tests.trainer.models import VOCABULARY, headers_of, tiny_model
from tests.trainer.oracle import (
    DIVERGENCES,
    ESTIMATES,
    Identity,
    config_of,
    divergence,
    estimate,
)
from trainer.batches.batch_metrics import repetition
from trainer.batches.micro_batches import MicroBatch
from trainer.batches.packing import group_by_budget, pack
from trainer.batches.token_weights import TokenWeighting
from trainer.learner import Learner
from trainer.losses import build_objective
from trainer.rank import Rank
from trainer.student.placed import PlacedStudent
from trainer.utilization import ModelSize

K, MU_CAP = 5, 1.3
CPU = torch.device("cpu")
TOP: dict[str, Any] = {"top_k": K, "importance": "off"}
WEIGHED: dict[str, Any] = {"importance": "sequence", "importance_cap": MU_CAP}
ADVANTAGE: dict[str, Any] = {"gradient": "policy_gradient"}
CANDIDATES: dict[str, Any] = {"support": "student_topk", "top_k": K}
REDUCTIONS = {"forward_kl": "seq_mean_token_mean", "jsd": "seq_mean_token_sum"}
FAMILIES: dict[str, Any] = {
    **{kind: config_of(kind, importance_cap=MU_CAP) for kind in ESTIMATES},
    "k3 as an advantage": config_of("k3", **ADVANTAGE),
    "k1 of whole responses": config_of("k1", **WEIGHED),
    "top-k, bucket": config_of("forward_kl", **TOP),
    "top-k, ignore": config_of("reverse_kl", tail="ignore", **TOP),
    "top-k, renormalize": config_of("jsd", tail="renormalize", **TOP),
    "candidates": config_of("reverse_kl", importance="off", **CANDIDATES),
    "candidates, weighed": config_of("jsd", importance="truncated", **CANDIDATES),
    **{
        f"vocabulary, {kind}": config_of(
            kind, support="full_vocab", reduction=REDUCTIONS.get(kind, "token_mean")
        )
        for kind in DIVERGENCES
    },
    "reward": config_of("k1", reduction="seq_mean_token_sum_norm"),
}
REWARD = RewardConfig(weight=0.7)
MAX_TOKENS = 9

PLAIN = st.integers(0, 4).map(lambda length: [("student", length)])
BATCHES = st.lists(PLAIN | parts(), min_size=1, max_size=4).filter(
    lambda batch: any(length for one in batch for origin, length in one if origin == "student")
)
MODEL = tiny_model().double().eval()


def scores_of(kind: str, rollout: Rollout, seed: int) -> Scores:
    """A random teacher's, of the sampled positions."""
    sampled = rollout.response_ids
    logits = torch.from_numpy(np.random.default_rng(seed).normal(size=(len(sampled), VOCABULARY)))
    if kind == "hidden":
        return HiddenStates(logits.float().numpy(), "float32")
    table = logits.log_softmax(-1)
    own = table.numpy()[np.arange(len(sampled)), sampled].astype(np.float32)
    if kind == "sampled":
        return SampledLogprobs(own)
    if kind == "teacher_topk":
        ids = table.topk(K, dim=-1).indices
    else:
        ids = torch.from_numpy(rollout.topk_ids).long()
    rest = table.scatter(-1, ids, -torch.inf).logsumexp(-1).float().numpy()
    made = TopK if kind == "teacher_topk" else CandidateLogprobs
    return made(ids.int().numpy(), table.gather(-1, ids).float().numpy(), own, rest)


def samples(kind: str, batch: list[Parts]) -> list[Sample]:
    """With rewards; all are rollouts of one prompt."""
    made = []
    for index, after in enumerate(batch):
        rollout = sequence(f"p/{index}", after, prompt=1 + index, seed=index, top_k=K, media=False)
        rollout = replace(rollout, reward=float(index % 2))
        made.append(Sample(rollout.without_teacher_inputs, scores_of(kind, rollout, seed=index)))
    return made


# ── one row after the other ────────────────────────────────────────────────────────────────────


def double(array: Any) -> torch.Tensor:
    return torch.from_numpy(np.asarray(array)).double()


def outcomes(loss: Any, log_q: torch.Tensor, scores: Any, i: int) -> tuple[Any, Any]:
    """log p and log q of what a divergence sums over, in row i of the scores."""
    if loss.support == "full_vocab":
        return double(scores.states[i]).log_softmax(-1), log_q
    ids = torch.from_numpy(scores.ids[i]).long()
    log_p, own = double(scores.logprobs[i]), log_q[ids]
    if loss.tail == "renormalize":
        return log_p.log_softmax(-1), own.log_softmax(-1)
    if loss.tail == "ignore":
        return log_p, own
    rest = torch.stack([log_q[j] for j in range(VOCABULARY) if j not in ids.tolist()]).logsumexp(0)
    log_p = torch.cat([log_p, double(scores.rest_logprobs[i : i + 1])])
    return log_p, torch.cat([own, rest[None]])


def segments(rollout: Rollout) -> list[torch.Tensor]:
    """The token ids of each, found one span at a time."""
    found: list[list[int]] = []
    for start, end, origin in rollout.spans:
        found += [[]] if origin == "prompt" else []
        found[-1] += rollout.token_ids[start:end].tolist()
    return [torch.tensor(ids) for ids in found]


def weight_of(loss: Any, responses: list[int], length: int) -> float:
    """Of one token of a response of ``length`` tokens, in a batch of responses."""
    some = sum(n > 0 for n in responses)
    if not length:
        return 0.0
    return {
        "token_mean": 1 / sum(responses),
        "seq_mean_token_mean": 1 / (some * length),
        "seq_mean_token_sum": 1 / some,
        "seq_mean_token_sum_norm": 1 / (some * MAX_TOKENS),
    }[loss.reduction]


def versions_of(rollout: Rollout) -> list[int]:
    return [one.version for one in rollout.version_spans for _ in range(one.start, one.end)]


def oracle(model: Any, loss: Any, batch: list[Sample], rewarded: bool, oldest: int) -> torch.Tensor:
    """The loss with its gradient; of tokens older than a version there is the reward's alone."""
    responses = [len(sampled_positions(sample.rollout)) for sample in batch]
    newer = [sum(v >= oldest for v in versions_of(sample.rollout)) for sample in batch]
    rewards = np.array([sample.rollout.reward for sample in batch])
    advantages = (rewards - rewards.mean()) / max(rewards.std(), 1e-12)
    total = torch.zeros((), dtype=torch.float64)
    for index, (sample, advantage) in enumerate(zip(batch, advantages, strict=True)):
        rollout = sample.rollout
        table = torch.cat([model(ids[None]).logits[0] for ids in segments(rollout)])
        table = table.log_softmax(-1)
        rows: list[Any] = []
        for i, at in enumerate(sampled_positions(rollout)):
            log_q, token = table[at - 1], int(rollout.token_ids[at])
            ratio = (log_q[token] - double(rollout.rollout_logprobs)[i]).exp()
            if score_kind(loss) == "sampled":
                log_p = double(sample.scores.logprobs)[i]
                value = estimate(loss.kind, log_p, log_q[token])
                if loss.gradient == "policy_gradient":
                    value = value.detach() * log_q[token]
            else:
                value = divergence(loss, *outcomes(loss, log_q, sample.scores, i))
            rows.append((value, ratio))
        whole = torch.stack([r for _, r in rows]).prod() if rows else None
        for (value, ratio), version in zip(rows, versions_of(rollout), strict=True):
            corrected = ratio if loss.importance != "sequence" else whole
            sampled = loss.importance == "auto" and score_kind(loss) == "sampled"
            if sampled or loss.importance in ("truncated", "sequence"):
                value = value * corrected.detach().clamp_max(loss.importance_cap)
            if version >= oldest:
                total = total + weight_of(loss, newer, newer[index]) * value
            if rewarded:
                weight = weight_of(loss, responses, responses[index])
                low, high = 1 - REWARD.clip_low, 1 + REWARD.clip_high
                gain = torch.minimum(ratio * advantage, ratio.clamp(low, high) * advantage)
                if advantage < 0:
                    gain = gain.clamp_min(REWARD.dual_clip * advantage)
                total = total - REWARD.weight * weight * gain
    return total


def gradients(model: Any) -> torch.Tensor:
    every = (torch.zeros_like(p) if p.grad is None else p.grad for p in model.parameters())
    return torch.cat([one.flatten() for one in every])


@pytest.mark.slow
@pytest.mark.parametrize("name", FAMILIES)
@settings(max_examples=8)
@given(
    batch=BATCHES, budget=st.sampled_from([1, 24, 10**6]), oldest=st.sampled_from([0, 0, 3, 3, 4])
)
def test_it_is_that_of_rows_one_by_one(
    name: str, batch: list[Parts], budget: int, oldest: int
) -> None:
    """Tokens are of versions 2 and 3: older ones than 3 are masked, or all tokens."""
    loss, reward = FAMILIES[name], REWARD if name == "reward" else None
    made = samples(score_kind(loss), batch)
    reference = copy.deepcopy(MODEL)
    expected = oracle(reference, loss, made, reward is not None, oldest)
    if expected.requires_grad:
        expected.backward()

    shares, _ = TokenWeighting.of(loss, reward, MAX_TOKENS)(headers_of(made), oldest)
    heads = {"t": Identity(VOCABULARY)}
    settings = TrainConfig(max_grad_norm=1e9)
    rank = Rank(
        PlacedStudent(copy.deepcopy(MODEL), build_objective(loss, reward), settings, CPU, heads)
    )
    groups = group_by_budget([sample.rollout.tokens for sample in made], budget)
    found = rank.backward(
        [MicroBatch(tuple(made[i] for i in g), tuple(shares[i] for i in g)) for g in groups],
        oldest=oldest,
    )
    assert found.sums.get("total", 0.0) == pytest.approx(
        float(expected.detach()), rel=1e-7, abs=1e-9
    )
    torch.testing.assert_close(gradients(rank.model), gradients(reference), rtol=1e-6, atol=1e-9)


@given(batch=st.lists(parts(), min_size=1, max_size=3))
def test_packed_segments_have_the_logits_of_each_alone(batch: list[Parts]) -> None:
    made = samples("sampled", batch)
    packed = pack(made)
    alone = [ids for sample in made for ids in segments(sample.rollout)]
    lengths = [len(ids) for ids in alone]
    assert packed.starts.diff().tolist() == lengths
    assert packed.longest == max(lengths)
    with torch.no_grad():
        positions = {"position_ids": packed.position_ids, "use_cache": False}
        together = MODEL(input_ids=packed.input_ids, **positions).logits[0]
        expected = torch.cat([MODEL(ids[None]).logits[0] for ids in alone])
    torch.testing.assert_close(together, expected, rtol=0, atol=1e-12)


def test_attention_of_an_episode_costs_what_its_segments_cost() -> None:
    size = ModelSize(decoder=3_000, head=500, attention=(60, 60), windows=(None, 8))
    one = sequence("p/0", [("student", 9), ("prompt", 5), ("student", 7)]).header(0)
    assert size.of_sample(one) == size.training_flops([12, 12], [16])


# ── what a step says of them ───────────────────────────────────────────────────────────────────


def test_a_step_counts_sampled_tokens_as_the_response_and_all_tokens_as_work() -> None:
    batch = samples("teacher_topk", [[("student", 2), ("tool", 3), ("student", 1)]])
    rank = Rank(
        PlacedStudent(tiny_model(), build_objective(FAMILIES["top-k, bucket"]), TrainConfig(), CPU)
    )
    metrics = Learner(rank).train_batch(batch).metrics
    assert (metrics["train/response_tokens"], metrics["train/tokens"]) == (3, 7)


def test_a_loop_of_a_tool_is_no_repetition_and_the_same_turn_twice_is() -> None:
    rollout = sequence("p/0", [("student", 6), ("tool", 300), ("student", 6)])
    looped = np.concatenate([np.arange(6), np.zeros(300), np.arange(6, 12)]).astype(np.int32)
    assert repetition(replace(rollout, continuation=looped)) == 0
    rollout = sequence("p/0", [("student", 20), ("tool", 1), ("student", 20)], prompt=1)
    turns = np.concatenate([np.arange(20), [77], np.arange(20)]).astype(np.int32)
    assert repetition(replace(rollout, continuation=turns)) == pytest.approx(1 / 2)
