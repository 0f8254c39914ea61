"""A replica of a teacher that is a server of somebody else.

    rollouts ──one request each, at most ``concurrency`` at a time──► server ──JSON──► arrays

Lives in the scoring stage's process, behind the same Protocol as an engine's actor. The server is a
stranger: its answers are bounded by what it was asked, are neither decompressed nor redirected, and
one that cannot be meant is this replica's failure (StageError), whatever is wrong with it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, TypeVar

import aiohttp
import msgspec
import numpy as np

from async_opd.core.batch import Batch, unpack
from async_opd.core.errors import StageError, first_cause
from async_opd.core.offload import LARGE
from async_opd.core.samples import Prompt, Rollout, Sample
from async_opd.core.stages import SamplingSpec, StageReport
from async_opd.core.uid import rollout_uid
from async_opd.observability.activity import Activity
from teachers.agreement import Agreement
from teachers.endpoint.api import (
    AnswerCounter,
    AnswerLimits,
    Request,
    highest_id,
    make_api,
    scores_of,
)
from teachers.endpoint.spec import EndpointSpec

Item = TypeVar("Item")
Result = TypeVar("Result")

CONNECT_S = 10.0
HEALTH_S = 10.0
MAX_SHOWN = 300
"""Characters of a server's answer in an error."""
READ_BYTES = 1 << 16
DEFAULT_LIMITS = AnswerLimits()
READER_THREAD = ThreadPoolExecutor(1, thread_name_prefix="teacher's answer")
"""Reads large answers, one at a time in a process: each takes a multiple of its bytes meanwhile."""
MAX_TOKEN_ID = np.iinfo(np.int32).max

UNREADABLE = (ValueError, TypeError, LookupError, ArithmeticError, RecursionError, MemoryError)
"""What reading raises: msgspec's errors are ValueErrors, deep JSON is a RecursionError."""

REMEDIES = {
    400: "the server's log says what it refuses; loss.top_k needs as many --max-logprobs there",
    401: "set teachers.*.api_key_env",
    403: "set teachers.*.api_key_env",
    **dict.fromkeys((301, 302, 303, 307, 308), "set teachers.*.urls to where it redirects"),
    404: "check teachers.*.urls, api and served_model",
}


class EndpointReplica:
    """A client of one server. Pickled, it is another client of the same server."""

    def __init__(self, spec: EndpointSpec) -> None:
        self._spec = spec
        self._api = make_api(spec.api, spec.served_model)
        self._activity = Activity("score")
        self._agreement = Agreement()
        self._counters = dict.fromkeys(("tokens", "samples", "batches"), 0.0)
        self._session: aiohttp.ClientSession | None = None

    def __reduce__(self) -> tuple[type[EndpointReplica], tuple[EndpointSpec]]:
        """Connections stay in the process that has them."""
        return EndpointReplica, (self._spec,)

    async def ready(self) -> int:
        """Asks for the server's health. Returns 1: its workers are its own business."""
        try:
            async with asyncio.timeout(HEALTH_S):
                await self.call("GET", "/health")
        except TimeoutError:
            raise self._error(f"{self._spec.url}/health did not answer in {HEALTH_S:g} s") from None
        return 1

    async def score(self, batch: Batch) -> Batch:
        """Scores a batch of rollouts: the samples, in the same order."""
        rollouts = unpack(Rollout, [batch])
        with self._activity.busy():
            samples = await _gather_or_cancel(self._score, rollouts)
        self._counters["batches"] += 1
        self._counters["samples"] += len(rollouts)
        self._counters["tokens"] += sum(rollout.tokens for rollout in rollouts)
        self._agreement.add(samples)
        return Batch.pack(samples)

    async def _score(self, rollout: Rollout) -> Sample:
        top_k, known = self._spec.top_k, self._spec.vocabulary
        if not len(rollout.response_ids):
            return Sample(rollout, scores_of([], [], [], top_k))
        seen = rollout.seen_by_teacher
        answer = await self._ask(self._api.score(seen, top_k))
        reading = partial(self._api.scores, answer, seen, top_k)
        scores = await self._read_offloaded(len(answer), reading)
        sample = self.read(lambda: Sample(rollout.without_teacher_inputs, scores))
        if known is not None and highest_id(scores) >= known:
            raise self._error(
                f"answered with token {highest_id(scores)}, the student has only {known}",
                "teachers need the student's tokenizer",
            )
        return sample

    async def generate(self, prompts: Sequence[Prompt], sampling: SamplingSpec) -> list[Rollout]:
        """What the server itself answers, ``sampling.n`` times each, in order."""

        async def sample(asked: tuple[Prompt, int]) -> Rollout:
            prompt, index = asked
            answer = await self._ask(
                self._api.sample(prompt.seen_by_teacher, sampling, self._spec.eos_ids)
            )
            ids, finish = self.read(lambda: self._api.sampled(answer))
            self._check_sampled(ids, sampling.max_tokens)
            return Rollout.answer(rollout_uid(prompt.uid, index), prompt, ids, finish)

        with self._activity.busy():
            asked = [(prompt, index) for prompt in prompts for index in range(sampling.n)]
            return await _gather_or_cancel(sample, asked)

    def _check_sampled(self, ids: list[int], most: int) -> None:
        """StageError for more tokens than it was asked for, or one the student does not have."""
        known = MAX_TOKEN_ID + 1 if self._spec.vocabulary is None else self._spec.vocabulary
        if len(ids) > most:
            cause = f"{self._spec.url} answered with {len(ids)} tokens, it was asked for {most}"
            raise self._error(cause, "check teachers.*.api and the server's version")
        if ids and not 0 <= min(ids) <= max(ids) < known:
            raise self._error(
                f"answered with tokens from {min(ids)} to {max(ids)}, the student has only {known}",
                "teachers need the student's tokenizer",
            )

    async def report(self) -> StageReport:
        """What happened since the last report."""
        counters = {**self._counters, **self._agreement.drain()}
        self._counters = dict.fromkeys(self._counters, 0.0)
        return StageReport(
            counters=counters,
            gauges={"in_flight": float(self._activity.depth)},
            busy=self._activity.drain(),
            waits_for="" if self._activity.depth else "rollouts",
        )

    async def close(self) -> None:
        """Ends the connections."""
        if self._session is not None:
            await self._session.close()
            self._session = None

    # ── HTTP ───────────────────────────────────────────────────────────────────────────────────

    async def call(
        self,
        method: str,
        path: str,
        body: dict[str, Any] | None = None,
        limits: AnswerLimits = DEFAULT_LIMITS,
    ) -> bytes:
        """The answer's bytes. StageError for anything but 200, a redirection too.

        No more than ``limits`` is taken of it. More than ``concurrency`` calls wait for a
        connection. Its time is bounded by who calls.
        """
        url = f"{self._spec.url}{path}"
        asked = self._connections().request(method, url, json=body, allow_redirects=False)
        try:
            async with asked as response:
                if response.status != 200:
                    raise self._refusal(
                        url, response.status, await response.content.read(MAX_SHOWN)
                    )
                encoding = response.headers.get("Content-Encoding", "identity")
                if encoding.lower() != "identity":
                    raise self._error(
                        f"{url} answered in {encoding[:MAX_SHOWN]!r}, and was asked not to encode",
                        "turn the server's compression off",
                    )
                return await self._body(url, response, limits)
        except (aiohttp.ClientError, OSError, ValueError) as error:
            cause = f"{url} cannot be reached: {type(error).__name__}: {str(error)[:MAX_SHOWN]}"
            raise self._error(cause, "is the server up, and the URL right?") from error

    def _refusal(self, url: str, status: int, answer: bytes) -> StageError:
        text = " ".join(answer.decode(errors="replace").split())[:MAX_SHOWN]
        return self._error(f"{url} answered {status}: {text}", REMEDIES.get(status, ""))

    async def _body(
        self, url: str, response: aiohttp.ClientResponse, limits: AnswerLimits
    ) -> bytes:
        """StageError for more than what can be the answer."""
        answer, counter = bytearray(), AnswerCounter(limits)
        async for piece in response.content.iter_chunked(READ_BYTES):
            answer += piece
            excess = counter.excess(piece)
            if excess is not None:
                raise self._error(
                    f"{url} answered with {excess}, the most that can be meant",
                    "check teachers.*.api and the server's version",
                )
        return bytes(answer)

    async def _ask(self, request: Request) -> bytes:
        return await self.call("POST", request.path, request.body, request.limits)

    def _connections(self) -> aiohttp.ClientSession:
        if self._session is None:
            headers, key = {"Accept-Encoding": "identity"}, self._spec.key()
            if key:
                headers["Authorization"] = f"Bearer {key}"
            self._session = aiohttp.ClientSession(
                connector=aiohttp.TCPConnector(limit=self._spec.concurrency),
                timeout=aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_S),
                headers=headers,
                auto_decompress=False,
                cookie_jar=aiohttp.DummyCookieJar(),
                json_serialize=lambda value: msgspec.json.encode(value).decode(),
            )
        return self._session

    def read(self, reading: Callable[[], Result]) -> Result:
        """What an answer holds; StageError for one that cannot be meant."""
        try:
            return reading()
        except UNREADABLE as error:
            found = f"{type(error).__name__}: {str(error)[:MAX_SHOWN]}"
            cause = f"{self._spec.url} answered with what cannot be scores: {found}"
            raise self._error(cause, "check teachers.*.api and the server's version") from error

    async def _read_offloaded(self, nbytes: int, reading: Callable[[], Result]) -> Result:
        """As ``read``; a large answer beside the event loop, when those before it are read."""
        if nbytes < LARGE:
            return self.read(reading)
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(READER_THREAD, self.read, reading)

    def _error(self, cause: str, remedy: str = "") -> StageError:
        return StageError(self._spec.name, cause, remedy)


async def _gather_or_cancel(
    work: Callable[[Item], Awaitable[Result]], items: Sequence[Item]
) -> list[Result]:
    """Results in order; the first error cancels the others."""

    async def one(item: Item) -> Result:
        return await work(item)

    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(one(item)) for item in items]
    except ExceptionGroup as errors:
        raise first_cause(errors) from errors
    return [task.result() for task in tasks]
