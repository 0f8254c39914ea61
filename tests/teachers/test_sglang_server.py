"""Teachers on a real SGLang server, from its own wheel: scores against transformers, and errors."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest

from async_opd.config.load import load_config
from async_opd.core.batch import Batch
from async_opd.core.errors import Problem, StageError
from async_opd.core.samples import Rollout, Sample
from async_opd.core.stages import SamplingSpec
from teachers.endpoint.api import SglangApi
from teachers.endpoint.check import check_endpoints
from teachers.endpoint.replica import EndpointReplica, EndpointSpec
from tests.conftest import make_rollout
from tests.engines import EOS, prompts
from tests.servers import SglangServer
from tests.teachers.test_endpoint_check import EXAMPLE
from tests.teachers.test_teacher_engine import TEACHER, K, model, rollouts, table_of, tables_of

pytestmark = pytest.mark.long

KEY, KEY_ENV = "sk-not-to-be-seen", "SORTER_KEY"
VOCABULARY = 128


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SglangServer]:
    server = SglangServer(TEACHER, "sorter", KEY, tmp_path_factory.mktemp("server") / "log.txt")
    server.start()
    server.wait()
    yield server
    server.kill()


@pytest.fixture(autouse=True)
def _key_in_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(KEY_ENV, KEY)


@asynccontextmanager
async def client(server: SglangServer, **changes: Any) -> AsyncIterator[EndpointReplica]:
    """A teacher on the server."""
    spec = EndpointSpec(
        name="teacher sort/0",
        url=server.url,
        api="sglang",
        served_model="sorter",
        top_k=K,
        eos_ids=EOS,
        concurrency=16,
        vocabulary=VOCABULARY,
        key_env=KEY_ENV,
    )
    replica = EndpointReplica(replace(spec, **changes))
    try:
        yield replica
    finally:
        await replica.close()


async def scored(server: SglangServer, *asked: Rollout, **changes: Any) -> list[Sample]:
    async with client(server, **changes) as replica:
        return (await replica.score(Batch.pack(asked))).unpack()  # type: ignore[return-value]


# ── scores ─────────────────────────────────────────────────────────────────────────────────────


@dataclass
class Seen:
    """Samples of all rollouts in one batch, sent at the same time."""

    best: list[Any]
    sampled: list[Any]
    tables: list[Any]
    """Of each rollout, log-probabilities [R, V] of transformers."""


@pytest.fixture(scope="module")
def seen(server: SglangServer) -> Seen:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(KEY_ENV, KEY)
        best = asyncio.run(scored(server, *rollouts()))
        sampled = asyncio.run(scored(server, *rollouts(), top_k=0))
    return Seen(best, sampled, tables_of("teacher-sort"))


def test_the_sampled_tokens_have_the_log_probabilities_of_transformers(seen: Seen) -> None:
    """After long prompts in several chunks, behind cached prefixes, in several spans, and none."""
    for found, best, table in zip(seen.sampled, seen.best, seen.tables, strict=True):
        own = table[np.arange(len(table)), found.rollout.response_ids]
        np.testing.assert_allclose(found.scores.logprobs, own, atol=1e-4)
        np.testing.assert_allclose(best.scores.sampled_logprobs, own, atol=1e-4)


def test_the_best_are_the_k_most_probable_tokens_with_their_log_probabilities(seen: Seen) -> None:
    for found, table in zip(seen.best, seen.tables, strict=True):
        best = np.sort(table, axis=-1)[:, ::-1][:, :K]
        np.testing.assert_allclose(found.scores.logprobs, best, atol=1e-4)
        own = np.take_along_axis(table, found.scores.ids.astype(np.int64), axis=-1)
        np.testing.assert_allclose(found.scores.logprobs, own, atol=1e-4)


def test_samples_come_back_in_order_also_those_without_a_response(seen: Seen) -> None:
    assert [one.rollout.uid for one in seen.best] == [rollout.uid for rollout in rollouts()]
    assert min(len(one.rollout.response_ids) for one in seen.best) == 0


def test_the_whole_vocabulary_can_be_the_best(server: SglangServer) -> None:
    (sample,) = asyncio.run(scored(server, rollouts()[2], top_k=VOCABULARY))
    scores: Any = sample.scores
    np.testing.assert_array_equal(np.sort(scores.ids), [np.arange(VOCABULARY)] * len(scores.ids))


def test_the_last_token_of_the_vocabulary_has_the_log_probability_of_transformers(
    server: SglangServer,
) -> None:
    rollout = replace(rollouts()[2], continuation=np.array([VOCABULARY - 1, 20], np.int32))
    (sample,) = asyncio.run(scored(server, rollout, top_k=0))
    table = table_of(model("teacher-sort"), rollout)
    own = table[[0, 1], rollout.response_ids]
    np.testing.assert_allclose(sample.scores.logprobs, own, atol=1e-4)  # type: ignore[union-attr]


# ── its own answers ────────────────────────────────────────────────────────────────────────────


async def answers(server: SglangServer, longest: int, **changes: Any) -> list[Rollout]:
    async with client(server, **changes) as replica:
        return await replica.generate(prompts(4), SamplingSpec(longest, 0.0, 1.0, 1))


async def test_its_own_answers_end_with_the_end_token(server: SglangServer) -> None:
    found = await answers(server, 8)
    assert [int(one.response_ids[-1]) for one in found] == [EOS[0]] * 4
    assert [one.finish_reason for one in found] == ["stop"] * 4


async def test_its_own_answers_end_at_the_longest_length(server: SglangServer) -> None:
    found = await answers(server, 2)
    assert [(len(one.response_ids), one.finish_reason) for one in found] == [(2, "length")] * 4


async def test_its_own_answers_end_with_any_of_the_students_end_tokens(
    server: SglangServer,
) -> None:
    (first, *_) = await answers(server, 8)
    third = int(first.response_ids[2])
    (cut, *_) = await answers(server, 8, eos_ids=(third,))
    assert int(cut.response_ids[-1]) == third
    assert len(cut.response_ids) <= 3
    assert cut.finish_reason == "stop"


async def test_an_answer_that_somebody_aborts_is_a_failure(server: SglangServer) -> None:
    async with client(server, eos_ids=()) as replica:
        body = {"input_ids": [1], "sampling_params": {"max_new_tokens": 120, "ignore_eos": True}}
        answer = asyncio.create_task(replica.call("POST", "/generate", body))
        while not answer.done():
            await replica.call("POST", "/abort_request", {"rid": "", "abort_all": True})
        with pytest.raises(StageError, match="abort"):
            replica.read(lambda: SglangApi().sampled(answer.result()))


# ── errors ─────────────────────────────────────────────────────────────────────────────────────


async def error(asking: Callable[[], Awaitable[Any]]) -> StageError:
    with pytest.raises(StageError) as caught:
        await asking()
    return caught.value


async def test_a_wrong_key_is_an_error_that_names_its_setting_and_not_the_key(
    server: SglangServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(KEY_ENV, "wrong-key")
    found = await error(lambda: scored(server, make_rollout()))
    assert "answered 401" in found.cause
    assert "api_key_env" in found.remedy
    assert "wrong-key" not in str(found)


async def test_a_sequence_may_be_seven_tokens_shorter_than_the_context_length(
    server: SglangServer,
) -> None:
    fits = make_rollout(tokens=135 - 7 - 3)
    (sample,) = await scored(server, fits)
    assert len(sample.rollout.response_ids) == 125
    longer = make_rollout(tokens=135 - 6 - 3)
    found = await error(lambda: scored(server, longer))
    assert "answered 400" in found.cause
    assert "exceeds the maximum allowed length" in found.cause


async def test_a_token_it_does_not_have_is_refused_and_the_server_goes_on(
    server: SglangServer,
) -> None:
    async with client(server) as replica:
        last, beyond = (SglangApi().has(VOCABULARY - 1 + more) for more in (0, 1))
        await replica.call("POST", last.path, last.body)
        found = await error(lambda: replica.call("POST", beyond.path, beyond.body))
    assert "out-of-vocabulary token id 128" in found.cause
    assert len(await scored(server, make_rollout())) == 1


async def test_it_scores_no_other_ids_at_each_position(server: SglangServer) -> None:
    """It is why servers cannot score the student's own best tokens (loss.support: student_topk)."""
    async with client(server) as replica:
        request = SglangApi().score(make_rollout(), 0)
        body = request.body | {"token_ids_logprob": [[5], [6]]}
        found = await error(lambda: replica.call("POST", request.path, body))
    assert "must be a flat list of integers" in found.cause


# ── the check before a run ─────────────────────────────────────────────────────────────────────


def problems(server: SglangServer, *overrides: str, name: str = "sorter") -> list[Problem]:
    teacher = {
        "kind": "endpoint",
        "api": "sglang",
        "urls": [server.url],
        "served_model": name,
        "api_key_env": KEY_ENV,
    }
    config = load_config(EXAMPLE, [f"teachers.sort={json.dumps(teacher)}", *overrides])
    return check_endpoints(config, "c.yaml")


def test_the_server_of_the_quickstarts_teacher_has_no_problem(server: SglangServer) -> None:
    assert problems(server) == []


def test_another_name_than_the_served_one_is_refused(server: SglangServer) -> None:
    (problem,) = problems(server, name="other")
    assert "serves sorter, not other" in problem.message


def test_responses_longer_than_it_scores_are_refused(server: SglangServer) -> None:
    assert problems(server, "rollout.max_tokens=127") == []
    (problem,) = problems(server, "rollout.max_tokens=128")
    assert "takes 135 tokens, rollout.max_tokens needs at least 136" in problem.message
    assert "at most 127" in problem.remedy


# ── restarts ───────────────────────────────────────────────────────────────────────────────────


async def test_the_same_client_gets_the_same_scores_from_a_restarted_server(
    server: SglangServer, seen: Seen
) -> None:
    rollout, before = rollouts()[-1], seen.best[-1].scores
    async with client(server) as replica:
        await replica.score(Batch.pack([rollout]))
        server.kill()
        found = await error(lambda: replica.score(Batch.pack([rollout])))
        assert "cannot be reached" in found.cause
        server.start()
        await asyncio.to_thread(server.wait)
        await replica.ready()
        samples: list[Any] = (await replica.score(Batch.pack([rollout]))).unpack()
    np.testing.assert_allclose(samples[0].scores.logprobs, before.logprobs, atol=1e-4)
