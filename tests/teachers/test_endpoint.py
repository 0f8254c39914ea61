"""Teachers on servers of somebody else: small HTTP servers that answer as the real ones do."""

from __future__ import annotations

import asyncio
import json
import pickle
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer
from hypothesis import given
from hypothesis import strategies as st

from async_opd.config.sections.teachers import EndpointHealth
from async_opd.core.batch import Batch
from async_opd.core.errors import NoReplica, StageError
from async_opd.core.row import Media
from async_opd.core.samples import Rollout, Sample
from async_opd.core.scores import SampledLogprobs, TopK
from async_opd.core.stages import SamplingSpec
from teachers.endpoint.api import Api, SglangApi, VllmApi
from teachers.endpoint.replica import EndpointReplica, EndpointSpec
from teachers.pool import TeacherPool
from teachers.replica_slots import ReplicaSlots
from teachers.segments import by_segment, joined
from tests.conftest import make_prompt, make_rollout
from tests.sequences import Parts, parts, sampled_positions, sequence
from tests.world.clock import ManualTimer, settle

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]
KEY = "sk-not-to-be-seen"


def vllm_answer(rows: list[Any], **choice: Any) -> bytes:
    return json.dumps(
        {"id": "cmpl-1", "choices": [{"index": 0, "prompt_logprobs": rows, **choice}]}
    ).encode()


def entry(logprob: float, rank: int = 1) -> dict[str, Any]:
    return {"logprob": logprob, "rank": rank, "decoded_token": "x"}


def vllm_rows(rollout: Rollout, top_k: int) -> list[Any]:
    """The sampled token first, then the best; it is one of them where it is token 1."""
    rows: list[Any] = [None]
    for token in [*rollout.prompt.token_ids.tolist(), *rollout.response_ids.tolist()][1:]:
        best = {str(1 + rank): entry(-0.5 - rank, rank + 1) for rank in range(top_k)}
        rows.append({str(token): entry(-0.5 if token == 1 else -7.5, 9)} | best)
    return rows


def sglang_answer(rollout: Rollout, top_k: int, **meta: Any) -> bytes:
    """As SGLang 0.5.23 answers; without ``top_k`` it leaves out the fields of the best."""
    response = rollout.response_ids.tolist()
    found: dict[str, Any] = {
        "id": "a1",
        "finish_reason": {"type": "length", "length": 1},
        "prompt_tokens": rollout.tokens,
        "weight_version": "default",
        "num_retractions": 0,
        "input_token_logprobs": [[None, 2, None], *[[-7.5, token, None] for token in response]],
        "output_token_logprobs": [[-0.1, 3, None]],
        "output_token_logprobs_length": 1,
    }
    if top_k:
        best = [[-0.5 - rank, 1 + rank, None] for rank in range(top_k)]
        found |= {"input_top_logprobs": [None, *[best] * len(response)]}
        found |= {"output_top_logprobs": [best]}
    found |= {"completion_tokens": 1, "cached_tokens": 2, "cached_tokens_details": {"device": 2}}
    return json.dumps({"text": "", "output_ids": [3], "meta_info": found | meta}).encode()


ROLLOUT = make_rollout(tokens=4)  # response 0, 1, 2, 3: tokens 1 and 2 are among the best


# ── answers ────────────────────────────────────────────────────────────────────────────────────


def test_a_vllm_answer_becomes_the_k_best_and_the_sampled_token() -> None:
    """A sampled token that is one of the best is found there."""
    scores = VllmApi("m").scores(vllm_answer(vllm_rows(ROLLOUT, 2)), ROLLOUT, 2)
    assert isinstance(scores, TopK)
    np.testing.assert_array_equal(scores.ids, [[1, 2]] * 4)
    np.testing.assert_allclose(scores.logprobs, [[-0.5, -1.5]] * 4)
    np.testing.assert_allclose(scores.sampled_logprobs, [-7.5, -0.5, -1.5, -7.5])
    scores = VllmApi("m").scores(vllm_answer(vllm_rows(ROLLOUT, 0)), ROLLOUT, 0)
    assert isinstance(scores, SampledLogprobs)
    assert scores.logprobs.shape == (4,)


def test_an_sglang_answer_starts_one_token_before_the_response() -> None:
    scores = SglangApi().scores(sglang_answer(ROLLOUT, 2), ROLLOUT, 2)
    assert isinstance(scores, TopK)
    np.testing.assert_allclose(scores.sampled_logprobs, [-7.5] * 4)
    np.testing.assert_array_equal(scores.ids, [[1, 2]] * 4)
    body = SglangApi().score(ROLLOUT, 2).body
    assert (len(body["input_ids"]), body["logprob_start_len"]) == (7, 2)


def test_an_sglang_server_may_call_only_the_highest_of_the_tokens_0() -> None:
    """It does so with the last token of its vocabulary, whose log-probability is right."""
    entries = [[None, 2, None], *[[-7.5, token, None] for token in (0, 1, 2, 0)]]
    scores = SglangApi().scores(sglang_answer(ROLLOUT, 0, input_token_logprobs=entries), ROLLOUT, 0)
    assert isinstance(scores, SampledLogprobs)
    np.testing.assert_allclose(scores.logprobs, [-7.5] * 4)
    entries[3][1] = 0
    with pytest.raises(ValueError, match="other tokens"):
        SglangApi().scores(sglang_answer(ROLLOUT, 0, input_token_logprobs=entries), ROLLOUT, 0)


def value(at: int) -> float:
    """The log-probability of the token at a position."""
    return -0.5 - at / 8


def vllm_server(body: dict[str, Any]) -> bytes:
    """Says something else of each token of a prompt; the two best are 61 and 62."""
    rows: list[Any] = [None]
    for at, token in enumerate(body["prompt"][1:], start=1):
        best = {str(61 + rank): entry(value(at) - rank) for rank in range(body["prompt_logprobs"])}
        rows.append({str(token): entry(value(at))} | best)
    return vllm_answer(rows)


def sglang_server(body: dict[str, Any], last: int = 1 << 30) -> bytes:
    """The same of an SGLang server: its first entry is empty, and it calls its ``last`` token 0."""
    ids, start, k = body["input_ids"], body["logprob_start_len"], body["top_logprobs_num"]
    later = range(start + 1, len(ids))
    tops = [None, *[[[value(at) - rank, 61 + rank, None] for rank in range(k)] for at in later]]
    meta = {
        "input_token_logprobs": [[None, ids[start], None]]
        + [[value(at), ids[at] * (ids[at] != last), None] for at in later],
    }
    best = {"input_top_logprobs": tops, "output_top_logprobs": [tops[-1]]} if k else {}
    return json.dumps({"meta_info": meta | best}).encode()


SEEN = replace(ROLLOUT, prompt=replace(ROLLOUT.prompt, media=(Media("a" * 64, 3, 8, 8),)))


def test_a_server_gets_images_as_data_urls_and_their_places_as_token_ids() -> None:
    request = VllmApi("m").score(SEEN, 2, [b"png"])
    assert request.path == "/inference/v1/generate"
    assert request.body["content_parts"] == [
        {"type": "image_url", "url": "data:image/png;base64,cG5n"}
    ]
    assert request.body["token_ids"] == ROLLOUT.token_ids[: ROLLOUT.positions[-1][1]].tolist()
    assert request.body["sampling_params"]["prompt_logprobs"] == 2


def test_scores_behind_images_are_those_of_the_last_rows_and_fewer_are_refused() -> None:
    rows = [None, *[{"90": entry(-3)}] * 5, *vllm_rows(ROLLOUT, 2)[1:]]
    answer = json.dumps({"choices": [{"token_ids": [1]}], "prompt_logprobs": rows}).encode()
    expected: Any = VllmApi("m").scores(vllm_answer(vllm_rows(ROLLOUT, 2)), ROLLOUT, 2)
    found: Any = VllmApi("m").scores(answer, SEEN, 2)
    np.testing.assert_array_equal(found.logprobs, expected.logprobs)
    np.testing.assert_array_equal(found.sampled_logprobs, expected.sampled_logprobs)
    rows = vllm_rows(ROLLOUT, 2)[:-1]
    answer = json.dumps({"choices": [{"token_ids": [1]}], "prompt_logprobs": rows}).encode()
    with pytest.raises(ValueError, match="tokens instead of"):
        VllmApi("m").scores(answer, SEEN, 2)


SERVERS: dict[str, tuple[Api, Callable[[dict[str, Any]], bytes]]] = {
    "vllm": (VllmApi("m"), vllm_server),
    "sglang": (SglangApi(), sglang_server),
}
SAMPLED = parts().filter(lambda after: any(n for who, n in after if who == "student"))


@pytest.mark.parametrize("name", SERVERS)
@given(after=SAMPLED, top_k=st.sampled_from([0, 2]))
def test_scores_of_spans_are_those_of_each_token(name: str, after: Parts, top_k: int) -> None:
    (api, server), rollout = SERVERS[name], sequence("p/0", after)
    parts = [one for one in by_segment(rollout) if len(one.response_ids)]
    scores = joined([api.scores(server(api.score(o, top_k).body), o, top_k) for o in parts])
    places = [at for start, end in rollout.segments for at in range(end - start)]
    expected = np.array([value(places[at]) for at in sampled_positions(rollout)], np.float32)
    if top_k:
        assert isinstance(scores, TopK)
        np.testing.assert_array_equal(scores.sampled_logprobs, expected)
        np.testing.assert_array_equal(scores.ids, [[61, 62]] * len(expected))
        np.testing.assert_array_equal(scores.logprobs, np.stack([expected, expected - 1], 1))
    else:
        assert isinstance(scores, SampledLogprobs)
        np.testing.assert_array_equal(scores.logprobs, expected)


@pytest.mark.parametrize("name", SERVERS)
def test_tokens_after_the_last_sampled_one_are_not_sent(name: str) -> None:
    rollout = sequence("p/0", [("student", 2), ("tool", 3)])
    body = SERVERS[name][0].score(rollout, 0).body
    assert body.get("prompt", body.get("input_ids")) == rollout.token_ids[:5].tolist()


ROWS = vllm_rows(ROLLOUT, 2)
GARBAGE = {
    "no JSON": b"<html>",
    "another object": b"{}",
    "no choice": b'{"choices": []}',
    "no log-probabilities": b'{"choices": [{"text": ""}]}',
    "too few positions": vllm_answer(ROWS[:-1]),
    "too many tokens": vllm_answer([None, *vllm_rows(ROLLOUT, 4)[1:]]),
    "too few tokens": vllm_answer(vllm_rows(ROLLOUT, 0)),
    "not the sampled token": vllm_answer([*ROWS[:-1], {"77": entry(-1), "78": entry(-2)}]),
    "an empty position": vllm_answer([*ROWS[:-1], None]),
    "NaN": vllm_answer([*ROWS[:-1], {"3": entry(float("nan")), "1": entry(-1)}]),
    "no number": vllm_answer([*ROWS[:-1], {"3": entry("x"), "1": entry(-1)}]),
    "infinity": vllm_answer([*ROWS[:-1], {"3": entry(-1e999), "1": entry(-1)}]),
    "a negative token": vllm_answer([*ROWS[:-1], {"3": entry(-1), "-4": entry(-1)}]),
    "a huge token": vllm_answer([*ROWS[:-1], {"3": entry(-1), str(1 << 40): entry(-1)}]),
}


@pytest.mark.parametrize("answer", GARBAGE.values(), ids=GARBAGE)
def test_a_vllm_answer_that_cannot_be_meant_is_refused(answer: bytes) -> None:
    with pytest.raises(ValueError):  # noqa: PT011
        VllmApi("m").scores(answer, ROLLOUT, 2)


SGLANG_GARBAGE = {
    "too few positions": {"input_token_logprobs": [[None, 2, None]]},
    "no top": {"input_top_logprobs": []},
    "too few best": {"input_top_logprobs": [None, *[[[-0.5, 1, None]]] * 4]},
    "no number": {"input_token_logprobs": [[None, 2, None]] * 5},
    "a token twice": {"input_top_logprobs": [None, *[[[-0.5, 1, None], [-1.5, 1, None]]] * 4]},
}


@pytest.mark.parametrize("meta", SGLANG_GARBAGE.values(), ids=SGLANG_GARBAGE)
def test_an_sglang_answer_that_cannot_be_meant_is_refused(meta: dict[str, Any]) -> None:
    with pytest.raises(ValueError):  # noqa: PT011
        SglangApi().scores(sglang_answer(ROLLOUT, 2, **meta), ROLLOUT, 2)


# ── servers ────────────────────────────────────────────────────────────────────────────────────


@asynccontextmanager
async def served(
    score: Handler, healthy: Handler | None = None, **spec: Any
) -> AsyncIterator[EndpointReplica]:
    """A client of a server that answers ``/v1/completions`` by a function."""
    app = web.Application()
    app.router.add_post("/v1/completions", score)
    app.router.add_get("/health", healthy or nothing)
    async with TestServer(app) as server:
        replica = EndpointReplica(replace(SPEC, url=str(server.make_url("")).rstrip("/"), **spec))
        try:
            yield replica
        finally:
            await replica.close()


async def scored(answer: Handler, *rollouts: Rollout, **spec: Any) -> list[Any]:
    """What becomes of rollouts (one, if none is named) on a server that answers so."""
    async with served(answer, **spec) as replica:
        return (await replica.score(Batch.pack(rollouts or [make_rollout()]))).unpack()


def answers(**response: Any) -> Handler:
    """A server that always says the same."""

    async def answer(request: web.Request) -> web.Response:
        return web.Response(**response)

    return answer


VARIABLE = "SERVERS_OF_THIS_TEST"


@pytest.fixture(autouse=True)
def _key_in_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, KEY)


SPEC = EndpointSpec(
    name="teacher a/0",
    url="http://127.0.0.1:9",
    api="vllm",
    served_model="m",
    top_k=2,
    eos_ids=(0,),
    concurrency=3,
    key_env=VARIABLE,
)


async def nothing(request: web.Request) -> web.Response:
    return web.Response()


async def good(request: web.Request) -> web.Response:
    body = await request.json()
    rollout = make_rollout(tokens=len(body["prompt"]) - 3)
    return web.Response(body=vllm_answer(vllm_rows(rollout, body["prompt_logprobs"])))


async def test_each_segment_with_sampled_tokens_is_one_request_in_order() -> None:
    asked = []

    async def answer(request: web.Request) -> web.Response:
        asked.append((await request.json())["prompt"])
        return web.Response(body=vllm_server({"prompt": asked[-1], "prompt_logprobs": 2}))

    turns = [("student", 2), ("tool", 1), ("prompt", 4), ("prompt", 2), ("student", 1)]
    (sample,) = await scored(answer, rollout := sequence("p/0", turns))
    assert asked == [rollout.token_ids[:5].tolist(), rollout.token_ids[10:13].tolist()]
    assert sample.scores.sampled_logprobs.tolist() == [value(3), value(4), value(2)]


async def test_a_batch_comes_back_as_samples_in_order() -> None:
    rollouts = [make_rollout(f"p{index}/0", tokens=index) for index in range(7)]
    samples = await scored(good, *rollouts)
    assert all(isinstance(sample, Sample) for sample in samples)
    assert [sample.rollout.uid for sample in samples] == [r.uid for r in rollouts]


async def test_no_more_requests_than_concurrency_are_in_flight() -> None:
    depth, most = 0, 0

    async def slow(request: web.Request) -> web.Response:
        nonlocal depth, most
        depth += 1
        most = max(most, depth)
        await settle()
        depth -= 1
        return await good(request)

    await scored(slow, *(make_rollout(f"p{i}/0") for i in range(12)))
    assert most == 3


async def test_the_key_is_sent_as_a_bearer_token_and_in_no_text_or_error() -> None:
    seen = []

    async def note(request: web.Request) -> web.Response:
        seen.append(request.headers["Authorization"])
        return await good(request)

    await scored(note)
    assert seen == [f"Bearer {KEY}"]
    with pytest.raises(StageError) as caught:
        await scored(answers(status=401, text="no"))
    assert KEY not in f"{SPEC!r}{SPEC}{caught.value!r}{caught.value}"
    assert "api_key_env" in str(caught.value)


async def test_a_client_travels_to_another_process_also_after_a_request() -> None:
    rows = vllm_rows(make_rollout(), SPEC.top_k)
    async with served(answers(body=vllm_answer(rows))) as replica:
        await replica.score(Batch.pack([make_rollout()]))
        other = pickle.loads(pickle.dumps(replica))
        try:
            await other.score(Batch.pack([make_rollout()]))
        finally:
            await other.close()


@pytest.mark.parametrize("status", [400, 404, 500, 503])
async def test_an_error_of_the_server_says_which_and_what(status: int) -> None:
    with pytest.raises(StageError, match=f"answered {status}: out of patience"):
        await scored(answers(status=status, text="out of\n patience"))


async def test_a_server_that_is_not_there_is_an_error_with_its_url() -> None:
    replica = EndpointReplica(SPEC)
    with pytest.raises(StageError, match=r"127.0.0.1:9/v1/completions cannot be reached"):
        await replica.score(Batch.pack([make_rollout()]))
    await replica.close()


async def test_a_connection_that_breaks_in_the_answer_is_an_error() -> None:
    async def half(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Length": "1000"})
        await response.prepare(request)
        await response.write(b'{"choices"')
        request.transport.close()
        return response

    with pytest.raises(StageError, match="cannot be reached"):
        await scored(half)


async def test_a_token_the_student_lacks_and_garbage_are_errors_with_a_remedy() -> None:
    with pytest.raises(StageError, match="token 2, the student has only 2"):
        await scored(good, vocabulary=2)
    with pytest.raises(StageError, match="does not fit the request") as caught:
        await scored(answers(body=GARBAGE["too few positions"]))
    assert "teachers.*.api" in caught.value.remedy


async def test_its_own_answers_are_rollouts() -> None:
    async def answer(request: web.Request) -> web.Response:
        body = await request.json()
        assert (body["max_tokens"], body["stop_token_ids"]) == (4, [0])
        return web.Response(body=vllm_answer([], token_ids=[5, 6, 0], finish_reason="stop"))

    async with served(answer) as replica:
        (rollout,) = await replica.generate(
            [make_prompt()], SamplingSpec(max_tokens=4, temperature=0.0, top_p=1.0, n=1)
        )
    assert (rollout.uid, rollout.response_ids.tolist()) == ("p/0", [5, 6, 0])
    assert rollout.finish_reason == "stop"


ABORTED = {
    "vllm": vllm_answer([], token_ids=[5, 6], finish_reason="abort"),
    "sglang": b'{"output_ids": [5, 6], "meta_info": {"finish_reason": {"type": "abort"}}}',
}


@pytest.mark.parametrize("name", SERVERS)
def test_an_answer_that_its_server_aborted_is_refused(name: str) -> None:
    """It is cut somewhere, neither at an end token nor at the longest length."""
    with pytest.raises(ValueError, match="abort"):
        SERVERS[name][0].sampled(ABORTED[name])


async def test_its_report_counts_tokens_and_agreement() -> None:
    async with served(good) as replica:
        await replica.score(Batch.pack([make_rollout(tokens=4)]))
        report = await replica.report()
    assert (report.counters["tokens"], report.counters["gap_tokens"]) == (7, 4)


# ── health: nobody here can rebuild a server ───────────────────────────────────────────────────


class Away:
    """A server that is away until ``back``."""

    def __init__(self) -> None:
        self.back = False

    async def score(self, request: web.Request) -> web.Response:
        return await good(request) if self.back else web.Response(status=503)

    async def healthy(self, request: web.Request) -> web.Response:
        return web.Response(status=200 if self.back else 503)


@asynccontextmanager
async def pool_of(
    replica: EndpointReplica, clock: ManualTimer, now: Callable[[], float]
) -> AsyncIterator[TeacherPool]:
    health = EndpointHealth(patience_s=100, tries=2)
    pool = TeacherPool(ReplicaSlots("a", [replica], health, timer=clock, clock=now))
    work = asyncio.create_task(pool.slots.members.run())
    try:
        yield pool
    finally:
        work.cancel()


async def test_a_server_that_comes_back_serves_again_without_a_rebuild() -> None:
    away, clock = Away(), ManualTimer()
    async with (
        served(away.score, away.healthy) as replica,
        pool_of(replica, clock, lambda: 0.0) as pool,
    ):
        scoring = asyncio.create_task(pool.score(Batch.pack([make_rollout()])))
        await until(lambda: not pool.slots.members.serving)
        away.back = True
        await until(scoring.done, lambda: clock.passes(30))
        assert len(scoring.result().samples) == 1
        assert (await pool.report()).gauges["rebuilds"] == 0


async def test_a_server_that_stays_away_is_given_up_and_then_work_fails() -> None:
    clock, time = ManualTimer(), [0.0]
    replica = EndpointReplica(SPEC)
    async with pool_of(replica, clock, lambda: time[0]) as pool:
        scoring = asyncio.create_task(pool.score(Batch.pack([make_rollout()])))
        await until(lambda: not pool.slots.members.serving)

        async def pass_() -> None:
            time[0] += 50
            await clock.passes(30)

        await until(scoring.done, pass_)
        with pytest.raises(NoReplica, match="cannot be reached"):
            scoring.result()
    await replica.close()


async def until(
    what: Callable[[], bool], meanwhile: Callable[[], Awaitable[None]] | None = None
) -> None:
    """Lets everything run, sockets too, until something is so."""
    async with asyncio.timeout(20):
        while not what():
            await asyncio.sleep(0.001)
            if meanwhile is not None:
                await meanwhile()
