"""A teacher's answer of many small values: it is refused by their count, before it is decoded."""

from __future__ import annotations

import asyncio
import json
import threading
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from async_opd.core.batch import Batch
from async_opd.core.errors import StageError
from async_opd.waiting.deadline import LARGE
from teachers.endpoint.api import AnswerCounter, AnswerLimits
from teachers.endpoint.replica import EndpointReplica, EndpointSpec
from tests.conftest import make_rollout
from tests.security.hostile_teacher import Hostile, serving

TOKENS = 256
TOP_K = 64
VLLM = b'{"choices":[{"prompt_logprobs":[%s]}]}'
SGLANG = b'{"meta_info":{"input_top_logprobs":[%s]}}'
BOUND_S = 30.0


def replica(url: str = "http://x") -> EndpointReplica:
    spec: dict[str, Any] = {"served_model": "m", "top_k": TOP_K, "eos_ids": (), "concurrency": 4}
    return EndpointReplica(EndpointSpec("teacher a/0", url, "vllm", **spec))


def filled(form: bytes, unit: bytes) -> bytes:
    """As many of them as the bound of bytes has room for."""
    room = AnswerLimits.of(TOKENS, TOP_K).nbytes - len(form) - len(unit)
    return form % b",".join([unit] * (room // (len(unit) + 1)))


def excess(answer: bytes, top_k: int = TOP_K) -> str | None:
    return AnswerCounter(AnswerLimits.of(TOKENS, top_k)).excess(answer)


@pytest.mark.parametrize(
    ("form", "unit"),
    [
        (VLLM, b"{}"),
        (VLLM, b"{ }"),
        (VLLM, b'{"1":{"logprob":1}}'),
        (VLLM, b"null"),
        (VLLM.replace(b"prompt_logprobs", b"token_ids"), b"300"),
        (SGLANG, b"[]"),
        (SGLANG, b"[[0,1,null]]"),
    ],
)
def test_many_small_values_within_the_bound_of_bytes_are_too_many(form: bytes, unit: bytes) -> None:
    answer = filled(form, unit)
    assert len(answer) <= AnswerLimits.of(TOKENS, TOP_K).nbytes
    assert "more than" in str(excess(answer))


async def test_they_are_refused_while_they_come_and_not_decoded(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    server = Hostile(b"{}," * 10_000, endless=True)
    async with serving(server) as url, asyncio.timeout(BOUND_S):
        asked = replica(url)
        monkeypatch.setattr(asked, "read", lambda reading: pytest.fail("it was decoded"))
        with pytest.raises(StageError, match=r"more than \d+ objects and lists"):
            await asked.score(Batch.pack([make_rollout(tokens=TOKENS)]))
        await asked.close()


def vllm_entry(token: int, text: str) -> dict[str, Any]:
    entry = {"logprob": -12.345678901234567, "rank": 123456, "decoded_token": text}
    return {str(150_000 + token): entry}


def honest(api: str, top_k: int, sampled: str, best: str) -> bytes:
    """An answer as a server gives it, but for its other fields."""
    if api == "vllm":
        rows: list[Any] = []
        for _ in range(TOKENS):
            row = vllm_entry(0, sampled)
            for token in range(1, top_k + 1):
                row |= vllm_entry(token, best)
            rows.append(row)
        return json.dumps({"choices": [{"prompt_logprobs": [None, *rows[1:]]}]}).encode()
    number = -12.345678901234567
    tops = [[[number, 150_000, best]] * top_k] * TOKENS
    tokens = [[number, 150_000, sampled]] * TOKENS
    meta = {"input_token_logprobs": tokens, "input_top_logprobs": tops}
    return json.dumps({"meta_info": meta, "output_ids": [1]}).encode()


@pytest.mark.slow
@pytest.mark.parametrize("api", ["vllm", "sglang"])
@given(
    top_k=st.sampled_from([0, 1, 8, 64]),
    sampled=st.sampled_from(["{" * 32, "[" * 32, "," * 32, " " * 128, "}]", "x", "\U0001f600" * 4]),
    best=st.sampled_from(["{", "[", ",", " something", "\u4e2d\u6587"]),
)
def test_an_honest_answer_fits_whatever_text_its_tokens_are(
    api: str, top_k: int, sampled: str, best: str
) -> None:
    assert excess(honest(api, top_k, sampled, best), top_k) is None


@given(st.binary(max_size=200).map(lambda text: text + b"{[,"), st.integers(0, 203))
def test_an_answer_is_counted_in_pieces_as_in_one(answer: bytes, cut: int) -> None:
    marks = answer.count(b"{") + answer.count(b"["), answer.count(b",")
    for less in range(2):
        counter = AnswerCounter(AnswerLimits(len(answer), marks[0] - less, marks[1]))
        pieces = (answer[:cut], answer[cut:])
        found = [said for said in map(counter.excess, pieces) if said is not None]
        assert bool(found) == bool(less)


@pytest.mark.slow
async def test_large_answers_are_read_one_at_a_time() -> None:
    asked, running, most = replica(), 0, 0
    lock, both = threading.Lock(), threading.Barrier(2)

    def reading() -> None:
        nonlocal running, most
        with lock:
            running += 1
            most = max(most, running)
        with pytest.raises(threading.BrokenBarrierError):
            both.wait(0.2)  # nobody else is here
        both.reset()
        with lock:
            running -= 1

    async with asyncio.timeout(BOUND_S):
        await asyncio.gather(*[asked._read_offloaded(LARGE, reading) for _ in range(4)])
    assert most == 1
