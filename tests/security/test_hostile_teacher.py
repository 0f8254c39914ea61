"""A teacher's server that is hostile costs a run that replica, a bounded answer, and no more."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from async_opd.config.load import load_config
from async_opd.core.batch import Batch
from async_opd.core.errors import StageError
from async_opd.core.stages import SamplingSpec
from teachers.endpoint.api import AnswerLimits
from teachers.endpoint.check import check_endpoints
from teachers.endpoint.replica import EndpointReplica, EndpointSpec
from tests.conftest import make_prompt, make_rollout
from tests.properties import examples
from tests.security.hostile_teacher import Hostile, bomb, completion, deep, serving

EXAMPLE = Path(__file__).parents[2] / "examples" / "quickstart.yaml"
ROLLOUT = make_rollout(tokens=4)  # of 7 tokens, the response's are 0 to 3
SAMPLING = SamplingSpec(max_tokens=8, temperature=1.0, top_p=1.0, n=1)
VOCABULARY = 100
BOUND_S = 30.0


@asynccontextmanager
async def client(server: Hostile, **changes: Any) -> AsyncIterator[EndpointReplica]:
    async with serving(server) as url:
        spec = {"top_k": 2, "api": "vllm", "vocabulary": VOCABULARY} | changes
        replica = EndpointReplica(
            EndpointSpec("teacher a/0", url, served_model="m", eos_ids=(0,), concurrency=2, **spec)
        )
        try:
            yield replica
        finally:
            await replica.close()


async def scored(server: Hostile, **changes: Any) -> Any:
    async with client(server, **changes) as replica, asyncio.timeout(BOUND_S):
        return await replica.score(Batch.pack([ROLLOUT]))


async def sampled(server: Hostile, **changes: Any) -> Any:
    async with client(server, **changes) as replica, asyncio.timeout(BOUND_S):
        return await replica.generate([make_prompt()], SAMPLING)


def entry(logprob: object = -1.0) -> dict[str, object]:
    return {"logprob": logprob}


def rows(*changed: object) -> list[object]:
    """Those of the rollout's seven tokens; the last ones are changed."""
    good = [{str(t): entry(), "50": entry(), "51": entry(-2)} for t in (0, 1, 2, 0, 1, 2, 3)]
    return [None, *good[1 : 7 - len(changed)], *changed]


async def test_an_answer_as_it_should_be_is_taken() -> None:
    samples = await scored(Hostile(completion(rows())))
    assert samples.headers[0].uid == ROLLOUT.uid


# ── bytes ──────────────────────────────────────────────────────────────────────────────────────


async def test_an_answer_is_bounded_by_its_tokens_times_k() -> None:
    server = Hostile(b" " * 4096, endless=True)
    most = AnswerLimits.of(7, 2).nbytes
    assert most < (1 << 20) + 256 * 7 * 4
    with pytest.raises(StageError, match=f"more than {most} bytes"):
        await scored(server)
    assert server.sent < most + (16 << 20)  # what sockets hold


async def test_an_endless_answer_to_a_prompt_is_bounded() -> None:
    with pytest.raises(StageError, match="more than"):
        await sampled(Hostile(b" " * 4096, endless=True))


async def test_an_endless_error_is_not_read() -> None:
    with pytest.raises(StageError, match="answered 500: xxx") as caught:
        await scored(Hostile(b"x" * 4096, status=500, endless=True))
    assert len(caught.value.cause) < 500


async def test_an_endless_sign_of_health_is_bounded() -> None:
    async with client(Hostile(b" " * 4096, endless=True)) as replica:
        with pytest.raises(StageError, match="more than"):
            await replica.call("GET", "/v1/models")


@pytest.mark.parametrize("encoding", ["gzip", "deflate", "br", "GZIP", "x-whatever"])
async def test_what_is_compressed_is_refused_and_not_decompressed(encoding: str) -> None:
    server = Hostile(bomb(), headers={"Content-Encoding": encoding})
    with pytest.raises(StageError, match=f"answered in '{encoding}'"):
        await scored(server)


async def test_servers_are_asked_not_to_compress() -> None:
    server = Hostile(completion(rows()))
    await scored(server)
    assert [headers["Accept-Encoding"] for _, headers in server.heard] == ["identity"]


# ── redirections ───────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("status", [301, 302, 303, 307, 308])
async def test_prompts_do_not_follow_a_redirection(status: int) -> None:
    elsewhere = Hostile(completion(rows()))
    async with serving(elsewhere) as url:
        server = Hostile(status=status, headers={"Location": f"{url}/v1/completions"})
        with pytest.raises(StageError, match=f"answered {status}") as caught:
            await scored(server)
    assert elsewhere.heard == []
    assert "redirects" in caught.value.remedy


async def test_a_server_sets_no_cookies() -> None:
    server = Hostile(completion(rows()), headers={"Set-Cookie": "a=b"})
    async with client(server) as replica:
        for _ in range(2):
            await replica.score(Batch.pack([ROLLOUT]))
    assert all("Cookie" not in headers for _, headers in server.heard)


# ── numbers ────────────────────────────────────────────────────────────────────────────────────

BAD_SCORES: dict[str, bytes] = {
    "deep JSON": deep(),
    "a log-probability above 0": completion(rows({"3": entry(0.5), "1": entry()})),
    "a log-probability above 0 among the best": completion(rows({"3": entry(), "1": entry(7)})),
    "a log-probability that is huge": completion(rows({"3": entry(1e300), "1": entry()})),
    "no log-probability": completion(rows({"3": entry(), "1": {}})),
    "no number": completion(rows({"3": entry("-1"), "1": entry("x")})),
    "a token beyond the vocabulary": completion(rows({"3": entry(), "100": entry()})),
    "a token beyond 32 bits": completion(rows({"3": entry(), str(1 << 31): entry()})),
    "a token beyond 64 bits": completion(rows({"3": entry(), str(1 << 70): entry()})),
    "a token of a thousand digits": completion(rows({"3": entry(), "9" * 1000: entry()})),
    "a negative token": completion(rows({"3": entry(), "-1": entry()})),
    "another shape": b'{"choices": [{"prompt_logprobs": {"a": 1}}]}',
    "no UTF-8": b'{"choices": ["\xff\xfe"]}',
    "nothing": b"",
}


@pytest.mark.parametrize("answer", BAD_SCORES.values(), ids=BAD_SCORES)
async def test_scores_that_cannot_be_meant_are_a_failure_of_their_replica(answer: bytes) -> None:
    with pytest.raises(StageError) as caught:
        await scored(Hostile(answer))
    assert caught.value.stage == "teacher a/0"
    assert len(caught.value.cause) < 1000


BAD_ANSWERS: dict[str, Any] = {
    "two million tokens for eight": [1] * 100_000,
    "a negative token": [1, -1],
    "a token beyond the vocabulary": [1, VOCABULARY],
    "a token beyond 64 bits": [1, 1 << 70],
    "no number": ["x"],
    "no list": "abc",
}


@pytest.mark.parametrize("ids", BAD_ANSWERS.values(), ids=BAD_ANSWERS)
@pytest.mark.parametrize("api", ["vllm", "sglang"])
async def test_responses_that_cannot_be_meant_are_a_failure_of_their_replica(
    api: str, ids: Any
) -> None:
    answer = completion([], token_ids=ids)
    if api == "sglang":
        answer = json.dumps({"meta_info": {}, "output_ids": ids}).encode()
    with pytest.raises(StageError) as caught:
        await sampled(Hostile(answer), api=api)
    assert caught.value.stage == "teacher a/0"


def sglang(tokens: list[list[Any]], tops: list[Any]) -> bytes:
    meta = {"input_token_logprobs": tokens, "input_top_logprobs": tops}
    return json.dumps({"meta_info": meta}).encode()


TOKENS: list[list[Any]] = [[None, 2, None], *[[-1.0, token, None] for token in range(4)]]
TOPS: list[Any] = [None, *[[[-1.0, 50, None], [-2.0, 51, None]]] * 4]
BAD_SGLANG = {
    "another token than the sampled one": sglang([*TOKENS[:-1], [-1.0, 77, None]], TOPS),
    "a log-probability above 0": sglang([*TOKENS[:-1], [0.5, 3, None]], TOPS),
    "the same token twice": sglang(TOKENS, [*TOPS[:-1], [[-0.1, 50, None], [-0.1, 50, None]]]),
    "a token beyond 64 bits": sglang(TOKENS, [*TOPS[:-1], [[-1, 50, None], [-2, 1 << 70, None]]]),
    "a token beyond the vocabulary": sglang(TOKENS, [*TOPS[:-1], [[-1, 5, None], [-2, 100, None]]]),
    "a negative token": sglang(TOKENS, [*TOPS[:-1], [[-1, 50, None], [-2, -1, None]]]),
    "deep JSON": b'{"meta_info": {"x": ' + b"[" * 200_000 + b"]" * 200_000 + b"}}",
}


async def test_an_sglang_answer_as_it_should_be_is_taken() -> None:
    samples = await scored(Hostile(sglang(TOKENS, TOPS)), api="sglang")
    assert samples.headers[0].uid == ROLLOUT.uid


@pytest.mark.parametrize("answer", BAD_SGLANG.values(), ids=BAD_SGLANG)
async def test_sglang_scores_that_cannot_be_meant_are_a_failure_of_their_replica(
    answer: bytes,
) -> None:
    with pytest.raises(StageError) as caught:
        await scored(Hostile(answer), api="sglang")
    assert caught.value.stage == "teacher a/0"


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(
            st.sampled_from(
                ["choices", "prompt_logprobs", "token_ids", "meta_info", "logprob", "3", "-1"]
            ),
            inner,
            max_size=4,
        )
    ),
    max_leaves=20,
)


@examples(200)
@given(JSON, st.sampled_from(["vllm", "sglang"]), st.booleans())
def test_whatever_json_a_server_answers_is_scores_or_a_failure(
    value: Any, api: str, cut: bool
) -> None:
    text = json.dumps(value).encode()
    answer = text[: len(text) // 2] if cut else text
    spec: dict[str, Any] = {"served_model": "m", "top_k": 2, "eos_ids": (), "concurrency": 1}
    replica = EndpointReplica(EndpointSpec("teacher a/0", "http://x", api, **spec))  # type: ignore[arg-type]
    reads: list[Callable[[], Any]] = [
        lambda: replica._api.scores(answer, ROLLOUT, 2),
        lambda: replica._api.sampled(answer),
    ]
    causes = []
    for reading in reads:
        try:
            replica.read(reading)
        except StageError as error:
            causes.append(error.cause)
    assert all("answered with JSON that does not fit the request" in cause for cause in causes)


# ── the checks before a run ────────────────────────────────────────────────────────────────────

SERVED = json.dumps({"data": [{"id": "m", "max_model_len": 4096}]}).encode()


@pytest.mark.parametrize(
    "server",
    [
        Hostile(deep()),
        Hostile(b" " * 4096, endless=True),
        Hostile(bomb(), headers={"Content-Encoding": "gzip"}),
        Hostile(status=302, headers={"Location": "http://127.0.0.1:9/"}),
        Hostile(json.dumps({"data": [{"id": "x" * 100_000}]}).encode()),
        Hostile(deep(), instead={"/v1/models": SERVED}),
        Hostile(b'{"tokens": [-1]}', instead={"/v1/models": SERVED}),
        Hostile(json.dumps({"tokens": [1 << 70]}).encode(), instead={"/v1/models": SERVED}),
        Hostile(b"\xff", instead={"/v1/models": SERVED, "/tokenize": b"{}"}),
    ],
    ids=lambda server: server.answer[:20].decode(errors="replace") or str(server.status),
)
async def test_a_hostile_server_is_a_problem_before_the_run(server: Hostile) -> None:
    async with serving(server) as url:
        overrides = [
            f"teachers.sorter={{kind: endpoint, urls: ['{url}'], served_model: m, "
            "sources: [sort], health: {timeout_s: 30}}"
        ]
        config = load_config(EXAMPLE, overrides)
        problems = await asyncio.to_thread(check_endpoints, config, "c.yaml")
    assert problems
    assert all(len(problem.message) < 1000 for problem in problems)
