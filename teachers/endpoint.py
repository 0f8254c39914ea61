"""A replica of a teacher that is a server of somebody else.

    rollouts ──one request each, at most ``concurrency`` at a time──► server ──JSON──► arrays

Lives in the scoring stage's process, behind the same Protocol as an engine's actor.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from typing import Any, TypeVar

import aiohttp
import msgspec
import numpy as np

from async_opd.core.activity import Activity
from async_opd.core.aside import aside
from async_opd.core.batch import Batch, unpack_rollouts
from async_opd.core.errors import StageError, first_cause
from async_opd.core.samples import Prompt, Rollout, Sample, VersionSpan
from async_opd.core.stages import SamplingSpec, StageReport
from teachers.agreement import Agreement
from teachers.endpoint_api import Request, highest_id, make_api, scores_of
from teachers.endpoint_spec import EndpointSpec

Item = TypeVar("Item")
Result = TypeVar("Result")

CONNECT_S = 10.0
HEALTH_S = 10.0
SHOWN = 300
"""Characters of a server's answer in an error."""

REMEDIES = {
    400: "the server's log says what it refuses; loss.top_k needs as many --max-logprobs there",
    401: "set teachers.*.api_key_env",
    403: "set teachers.*.api_key_env",
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
        rollouts = unpack_rollouts([batch])
        with self._activity.busy():
            samples = await _together(self._score, rollouts)
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
        scores = await aside(len(answer), self.read, reading)
        if known is not None and highest_id(scores) >= known:
            raise self._error(
                f"answered with token {highest_id(scores)}, the student has only {known}",
                "teachers need the student's tokenizer",
            )
        return Sample(rollout.once_scored, scores)

    async def generate(self, prompts: Sequence[Prompt], sampling: SamplingSpec) -> list[Rollout]:
        """What the server itself answers, ``sampling.n`` times each, in order."""

        async def sample(asked: tuple[Prompt, int]) -> Rollout:
            prompt, index = asked
            answer = await self._ask(
                self._api.sample(prompt.seen_by_teacher, sampling, self._spec.eos_ids)
            )
            ids, finish = self.read(lambda: self._api.sampled(answer))
            return Rollout(
                uid=f"{prompt.uid}/{index}",
                prompt=prompt,
                response_ids=np.asarray(ids, np.int32),
                rollout_logprobs=np.full(len(ids), np.nan, np.float32),
                version_spans=(VersionSpan(0, 0, len(ids)),) if ids else (),
                finish_reason=finish,
            )

        with self._activity.busy():
            asked = [(prompt, index) for prompt in prompts for index in range(sampling.n)]
            return await _together(sample, asked)

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

    async def call(self, method: str, path: str, body: dict[str, Any] | None = None) -> bytes:
        """The answer's bytes. StageError for anything but 200.

        More than ``concurrency`` calls wait for a connection. Bounded by who calls.
        """
        url = f"{self._spec.url}{path}"
        try:
            async with self._connections().request(method, url, json=body) as response:
                answer = await response.read()
        except (aiohttp.ClientError, OSError) as error:
            cause = f"{url} cannot be reached: {type(error).__name__}: {error}"
            raise self._error(cause, "is the server up, and the URL right?") from error
        if response.status != 200:
            text = " ".join(answer[: 4 * SHOWN].decode(errors="replace").split())[:SHOWN]
            cause = f"{url} answered {response.status}: {text}"
            raise self._error(cause, REMEDIES.get(response.status, ""))
        return answer

    async def _ask(self, request: Request) -> bytes:
        return await self.call("POST", request.path, request.body)

    def _connections(self) -> aiohttp.ClientSession:
        if self._session is None:
            key = self._spec.key()
            self._session = aiohttp.ClientSession(
                connector=aiohttp.TCPConnector(limit=self._spec.concurrency),
                timeout=aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_S),
                headers={"Authorization": f"Bearer {key}"} if key else None,
                json_serialize=lambda value: msgspec.json.encode(value).decode(),
            )
        return self._session

    def read(self, reading: Callable[[], Result]) -> Result:
        """What an answer holds; StageError for one that cannot be meant."""
        try:
            return reading()
        except ValueError as error:  # msgspec's are of this kind too
            cause = f"{self._spec.url} answered with what cannot be scores: {error}"
            raise self._error(cause, "check teachers.*.api and the server's version") from error

    def _error(self, cause: str, remedy: str = "") -> StageError:
        return StageError(self._spec.name, cause, remedy)


async def _together(
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
