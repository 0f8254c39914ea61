"""The sizes of samples, computed without them, against the real sizes."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from async_opd.config.sections.loss import ScoreKind
from async_opd.core.batch import MESSAGE_BYTES, Batch
from async_opd.core.samples import Sample
from async_opd.core.scores import CandidateLogprobs, HiddenStates, SampledLogprobs, Scores, TopK
from async_opd.core.stages import SamplingSpec
from async_opd.queue.sizes import (
    ITEM_BYTES,
    STORED_FROM,
    EpisodeBounds,
    Payload,
    Traffic,
    call_tokens,
    calls,
    image_copies,
    images_in_words,
    in_mib,
    kept_in_words,
    kept_steps,
    payloads,
    refused,
    rollout_bytes,
    routing_bytes,
    sample_bytes,
    score_bytes,
    stored_from,
    traffic,
)
from tests.checks.inputs import config, model, one
from tests.conftest import make_prompt, make_rollout

R, K, H = 300, 5, 16


def scores(kind: ScoreKind) -> Scores:
    sampled, rest = np.zeros(R, np.float32), np.zeros(R, np.float32)
    ids, logprobs = np.zeros((R, K), np.int32), np.zeros((R, K), np.float32)
    return {
        "sampled": SampledLogprobs(sampled),
        "teacher_topk": TopK(ids, logprobs, sampled, rest),
        "student_topk": CandidateLogprobs(ids, logprobs, sampled, rest),
        "hidden": HiddenStates(np.zeros((R, H), np.uint16), "bfloat16"),
    }[kind]


@pytest.mark.parametrize("kind", ["sampled", "teacher_topk", "student_topk", "hidden"])
def test_rollouts_and_samples_weigh_what_is_computed_and_an_item(kind: ScoreKind) -> None:
    rollout = make_rollout(tokens=R, prompt_tokens=1)
    if kind == "student_topk":
        rollout = replace(rollout, topk_ids=np.zeros((R, K), np.int32))
    (bare,) = Batch.pack([rollout]).headers
    computed = R * rollout_bytes(kind, K)
    assert computed <= bare.nbytes <= computed + ITEM_BYTES
    (header,) = Batch.pack([Sample(replace(rollout, topk_ids=None), scores(kind))]).headers
    computed = R * sample_bytes(kind, K, H, 2)
    assert computed <= header.nbytes <= computed + ITEM_BYTES


@pytest.mark.parametrize(
    ("loss", "device", "sample"),
    [
        ("{kind: k2}", "cpu", 12),
        ("{kind: forward_kl, top_k: 8}", "cpu", 16 + 64),
        ("{kind: forward_kl, support: student_topk, top_k: 8}", "cpu", 16 + 64),
        ("{kind: forward_kl, support: full_vocab}", "cpu", 8 + 128 * 4),
        ("{kind: forward_kl, support: full_vocab}", "cuda", 8 + 128 * 2),
    ],
)
def test_the_bytes_of_a_token_follow_the_objective(loss: str, device: str, sample: int) -> None:
    assert {one.sample for one in payloads(config(f"loss={loss}"), device)} == {sample}


def test_a_call_has_as_many_tokens_as_its_answer_may_weigh() -> None:
    assert 32768 * score_bytes("teacher_topk", 64) == (16 << 20) + 8 * 32768
    assert 32768 * score_bytes("hidden", 0, 4096, 2) == 256 << 20
    payload = Payload("t", "teacher_topk", 8, 528)
    assert payload.call_tokens() * payload.sample <= MESSAGE_BYTES
    assert (payload.call_tokens() + 1) * payload.sample > MESSAGE_BYTES
    assert Payload("t", "hidden", 8, 2 * MESSAGE_BYTES).call_tokens() == 1
    assert payload.call_tokens(stored=True) == 4 * MESSAGE_BYTES // 528
    assert Payload("t", "student_topk", 264, 528).call_tokens(stored=True) == MESSAGE_BYTES // 264


def test_the_calls_of_servers_stay_as_they_are_where_other_teachers_store_samples() -> None:
    made = config(SERVERS, "loss={kind: forward_kl, top_k: 8}", "queue.payloads=reference")
    assert call_tokens(made, "cpu") == {
        "sort": MESSAGE_BYTES // 80,
        "reverse": 4 * MESSAGE_BYTES // 80,
    }


@pytest.mark.parametrize(
    ("tokens", "payloads", "stored"),
    [
        (STORED_FROM // 80, "auto", None),
        (STORED_FROM // 80 + 1, "auto", STORED_FROM),
        (32768, "value", None),
        (8, "reference", 0),
    ],
)
def test_samples_are_stored_where_they_can_be_large(
    tokens: int, payloads: str, stored: int | None
) -> None:
    loss = "loss={kind: forward_kl, top_k: 8}"  # 80 bytes a token
    made = config(loss, f"rollout.max_tokens={tokens}", f"queue.payloads={payloads}")
    assert stored_from(made, "cpu") == stored


def long(**changes: Any) -> list[str]:
    settings = {
        "rollout.max_tokens": 32768,
        "loss": "{kind: forward_kl, top_k: 64}",
        "train.batch_size": 64,
        "async.sync_steps": 4,
        "async.staleness_threshold": 1,
        **changes,
    }
    return [f"{key}={value}" for key, value in settings.items()]


def test_a_step_moves_a_batch_of_the_longest_samples() -> None:
    made = config(*long())
    found = traffic(made, payloads(made, "cpu"), 100)
    assert found.sample == ITEM_BYTES + 400 + 32768 * 528
    assert found.step_samples == 64 * found.sample
    assert found.step_rollouts == 64 * (ITEM_BYTES + 400 + 32768 * 8)


@pytest.mark.parametrize(
    ("max_mib", "whole", "samples"),
    [(1_000_000, 0, 2 * 4 * 64), (32, 3 * MESSAGE_BYTES, 2 * 64)],
    ids=["what is in flight", "its bounds and what the trainer has taken"],
)
def test_the_queue_holds_no_more_than_it_may(max_mib: int, whole: int, samples: int) -> None:
    made = config(*long(), f"queue.max_mib={max_mib}")
    found = traffic(made, payloads(made, "cpu"), 0)
    assert found.queue == whole + samples * found.sample


def test_a_sample_that_the_queue_cannot_hold_is_refused_with_what_it_takes() -> None:
    made = config(*long(), "queue.max_mib=16")
    found = refused(made, traffic(made, payloads(made, "cpu"), 0))
    assert found is not None
    key, message, remedy = found
    assert key == "queue.max_mib"
    assert "32768 response tokens may have 16.5 MiB" in message
    assert "at least 17" in remedy
    made = config(*long(), "queue.max_mib=17")
    assert refused(made, traffic(made, payloads(made, "cpu"), 0)) is None


def test_preflight_refuses_it_too(tmp_path: Path) -> None:
    long = {
        key: model(tmp_path, name, max_position_embeddings=4096)
        for key, name in (
            ("student.model", "student"),
            ("teachers.sort.model", "teacher-sort"),
            ("teachers.reverse.model", "teacher-reverse"),
        )
    }
    problem = one(
        *(f"{key}={path}" for key, path in long.items()),
        "loss={kind: forward_kl, support: full_vocab}",
        "rollout.max_tokens=2100",
        "queue.max_mib=1",
    )
    assert problem.key == "queue.max_mib"
    assert "may have 1.0 MiB" in problem.message


@pytest.mark.parametrize(
    ("nbytes", "words"),
    [(5, "5 B"), (1536, "1.5 KiB"), (16 << 20, "16.0 MiB"), (3 << 30, "3.0 GiB")],
)
def test_bytes_are_printed_in_the_largest_unit_there_is_one_of(nbytes: int, words: str) -> None:
    assert in_mib(nbytes) == words


@pytest.mark.parametrize(("experts", "nbytes"), [(256, 24), (257, 48)])
def test_more_than_256_experts_take_two_bytes_each(
    tmp_path: Path, experts: int, nbytes: int
) -> None:
    """4 experts of each token in 6 layers."""
    settings = {"num_hidden_layers": 6, "num_experts_per_tok": 4, "num_experts": experts}
    (tmp_path / "config.json").write_text(json.dumps(settings))
    assert routing_bytes(config(f"student.model={tmp_path}", "train.routing=replay")) == nbytes


def test_prompts_are_asked_in_calls_whose_answers_are_one_message() -> None:
    sampling = SamplingSpec(max_tokens=32768, temperature=1.0, top_p=1.0, n=8)
    prompts = [make_prompt(f"p{index}") for index in range(100)]
    parts = list(calls(prompts, sampling))
    assert [prompt.uid for part in parts for prompt in part] == [p.uid for p in prompts]
    assert max(map(len, parts)) == MESSAGE_BYTES // (8 * (8 * 32768 + ITEM_BYTES + 64))
    bounds = EpisodeBounds(100_000, 600, 4)
    episodes = list(calls(prompts, sampling, bounds))
    assert max(map(len, episodes)) == MESSAGE_BYTES // (8 * (12 * 100_000 + ITEM_BYTES + 128))
    short = SamplingSpec(max_tokens=256, temperature=1.0, top_p=1.0, n=1)
    assert len(list(calls(prompts * 10, short))) == 1


def test_the_bounds_of_episodes_are_those_of_training_and_of_evaluations() -> None:
    played = "environment={kind: tools, tools: ['m:f'], max_turns: 3, max_observation_tokens: 10}"
    lengths = ("rollout.max_tokens=20", "eval.max_tokens=50")
    for most, tokens in (("null", 3 * 50), ("40", 40)):
        bounds = EpisodeBounds.of(config(played, *lengths, f"environment.max_tokens={most}"))
        assert bounds is not None
        assert bounds.tokens == tokens + 2 * 10


@pytest.mark.parametrize(("every", "keep", "steps"), [(10, 2, 80), (10, 9, 200), (0, 2, 200)])
def test_steps_since_the_oldest_kept_checkpoint_are_those_of_all_that_are_kept(
    every: int, keep: int, steps: int
) -> None:
    assert kept_steps(config(f"checkpoint.every={every}", f"checkpoint.keep={keep}")) == steps


def test_the_disk_space_of_kept_steps_is_printed_with_what_its_bound_cuts() -> None:
    most = Traffic(0, 0, 0, 1 << 30, 0)
    given = ("train.steps=64", "checkpoint.every=0", "log.replay_gib={}")
    words = kept_in_words(config(*(one.format(100) for one in given)), most)
    assert "of 64 steps since the oldest checkpoint 64.0 GiB" in words
    words = kept_in_words(config(*(one.format(32) for one in given)), most)
    assert words.startswith("log.replay: at most 1.0 GiB a step in the run directory")
    assert "checkpoint 32.0 GiB, which log.replay_gib cuts from 64.0 GiB" in words


SERVERS = "teachers.sort={kind: endpoint, urls: ['http://a', 'http://b'], served_model: m}"


@pytest.mark.parametrize(
    ("overrides", "copies"),
    [
        (["rollout.n=1"], 4.0),
        (["rollout.n=8"], 4 / 8),
        (["rollout.n=8", "train.ranks=4", "train.context_parallel=2"], 5 / 8),
        (["rollout.n=2", "train.ranks=8"], 5 / 2),
        (["rollout.n=8", SERVERS], 5 / 8 + 4 / 3),
    ],
)
def test_an_image_goes_once_to_the_queue_a_student_its_teacher_and_each_rank(
    overrides: list[str], copies: float
) -> None:
    assert image_copies(config(*overrides), "sort") == pytest.approx(copies)
    said = images_in_words(config("rollout.n=8"), [("sort", 1 << 20), ("sort", 3 << 20)])
    assert "images: 2.0 MiB a prompt that has some, 3.0 MiB at most" in said
    assert "0.5 times at most" in said
    assert "up to 4.0 GiB" in said
