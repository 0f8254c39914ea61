"""A replica of a teacher that is an external server.

    rollouts ──one request a segment, at most ``concurrency`` at a time──► server ──JSON──► arrays

The client runs in the scoring stage's process, behind the same Protocol as an engine's actor. It
does not trust the server: the request bounds the size of the answer, which is neither decompressed
nor redirected. An answer that does not fit its request is a failure of this replica (StageError).
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal, TypeVar

import aiohttp
import msgspec
import numpy as np

from async_opd.config.run_config import RunConfig
from async_opd.config.sections.loss import scored_top_k
from async_opd.config.sections.teachers import EndpointTeacher
from async_opd.core.batch import Batch
from async_opd.core.errors import RolloutFault, StageError, in_words
from async_opd.core.reports import StageReport
from async_opd.core.samples import Prompt, Rollout, Sample
from async_opd.core.scores import Scores
from async_opd.core.stages import SamplingSpec
from async_opd.core.uid import rollout_uid
from async_opd.media.cache import MediaCache, with_images
from async_opd.models.json_files import read_json
from async_opd.models.tokenizer import Text
from async_opd.waiting.deadline import LARGE, Bound, gather_or_cancel
from teachers.endpoint.api import (
    NO_IMAGES,
    TOKENS_AND_IMAGES,
    AnswerCounter,
    AnswerLimits,
    Request,
    highest_id,
    make_api,
    scores_of,
)
from teachers.meter import ScoringMeter
from teachers.segments import score_segments

Result = TypeVar("Result")

CONNECT_S = 10.0
HEALTH_S = 10.0
MAX_SHOWN = 300
"""Characters of a server's answer that an error quotes."""
READ_BYTES = 1 << 16
DEFAULT_LIMITS = AnswerLimits()
READER_THREAD = ThreadPoolExecutor(1, thread_name_prefix="teacher's answer")
"""Decodes large answers, one at a time in a process: decoding takes a multiple of the bytes."""
MAX_TOKEN_ID = np.iinfo(np.int32).max

UNREADABLE = (ValueError, TypeError, LookupError, ArithmeticError, RecursionError, MemoryError)
"""Errors of decoding: msgspec's are ValueErrors, deep JSON is a RecursionError."""

CHECK_API = "check teachers.*.api and the server's version"
SCALE_OUT = "start the server with --enable-scale-out: its other APIs score no images"
REMEDIES = {
    400: "the server's log says what it refuses; vLLM needs --max-logprobs of loss.top_k",
    401: "set teachers.*.api_key_env",
    403: "set teachers.*.api_key_env",
    **dict.fromkeys((301, 302, 303, 307, 308), "set teachers.*.urls to where it redirects"),
    404: "check teachers.*.urls, api and served_model",
}


@dataclass(frozen=True)
class EndpointSpec:
    """One server. ``top_k`` is 0 where only the sampled token is scored.

    ``vocabulary`` is the student's number of tokens, None if its ``config.json`` has none.
    """

    name: str
    url: str
    api: Literal["vllm", "sglang"]
    served_model: str
    top_k: int
    eos_ids: tuple[int, ...]
    concurrency: int
    vocabulary: int | None = None
    key_env: str | None = None
    unsampled_ids: tuple[int, ...] = ()
    """Tokens that stand for images, which the server's own answers behind images may not have."""

    def key(self) -> str | None:
        """The servers' key, read from the environment of this process; no message contains it.

        StageError if the variable is not set.
        """
        if self.key_env is None:
            return None
        key = os.environ.get(self.key_env)
        if not key:
            cause = "the process that calls the servers lacks the variable that api_key_env names"
            remedy = "export it on every node before ray start; the driver's is not passed on"
            raise StageError(self.name, cause, remedy)
        return key


def endpoint_spec(config: RunConfig, teacher: EndpointTeacher, name: str, url: str) -> EndpointSpec:
    """The spec of one of a teacher's servers."""
    text = Text.of(config)
    vocabulary = read_json(Path(config.student.model) / "config.json").get("vocab_size")
    return EndpointSpec(
        name=name,
        url=url,
        api=teacher.api,
        served_model=teacher.served_model,
        top_k=scored_top_k(config.loss),
        eos_ids=text.response_ends(),
        concurrency=teacher.concurrency,
        vocabulary=vocabulary if isinstance(vocabulary, int) else None,
        key_env=teacher.api_key_env,
        unsampled_ids=text.unsampled_ids,
    )


class EndpointReplica:
    """A client of one server. Pickled, it is another client of the same server."""

    def __init__(self, spec: EndpointSpec, media: MediaCache | None = None) -> None:
        self._spec = spec
        self._media = media
        self._api = make_api(spec.api, spec.served_model)
        self._meter = ScoringMeter(spec.name)
        self._session: aiohttp.ClientSession | None = None

    def __reduce__(self) -> tuple[type[EndpointReplica], tuple[EndpointSpec, MediaCache | None]]:
        """Only its arguments are pickled: connections stay in their process."""
        return EndpointReplica, (self._spec, self._media)

    async def ready(self) -> int:
        """Checks the server's health. Returns 1: no server reports its number of workers."""
        try:
            async with Bound(HEALTH_S):
                await self.call("GET", "/health")
        except TimeoutError:
            cause = f"{self._spec.url}/health did not answer within {HEALTH_S:g} s"
            raise self._error(cause, "is the server up, and not overloaded?") from None
        return 1

    async def score(self, batch: Batch) -> Batch:
        """The samples of a batch of rollouts, in the same order."""
        return await self._meter.score(batch, self._score)

    async def _score(self, rollout: Rollout) -> Sample:
        known = self._spec.vocabulary
        scores = await score_segments(self._spec.name, rollout, self._score_segment)
        sample = self.read(lambda: Sample(rollout.without_teacher_inputs, scores))
        if known is not None and highest_id(scores) >= known:
            raise self._foreign_token(highest_id(scores), known)
        return sample

    async def _score_segment(self, segment: Rollout) -> Scores:
        top_k = self._spec.top_k
        if not len(segment.response_ids):
            return scores_of([], [], [], top_k)
        images = await self._images(segment.prompt)
        answer = await self._ask(self._api.score(segment, top_k, images))
        reading = partial(self._api.scores, answer, segment, top_k)
        return await self._read_offloaded(len(answer), reading)

    async def generate(self, prompts: Sequence[Prompt], sampling: SamplingSpec) -> list[Rollout]:
        """The server's own answers, ``sampling.n`` to each prompt, in order."""

        async def sample(prompt: Prompt, index: int) -> Rollout:
            seen, images = prompt.for_teacher, await self._images(prompt)
            eos, never = self._spec.eos_ids, self._spec.unsampled_ids
            answer = await self._ask(self._api.sample(seen, sampling, eos, images, never))
            ids, finish = self.read(lambda: self._api.sampled(answer))
            self._check_sampled(ids, sampling.max_tokens)
            return Rollout.answer(rollout_uid(prompt.uid, index), prompt, ids, finish)

        with self._meter.activity.busy():
            asked = (sample(prompt, index) for prompt in prompts for index in range(sampling.n))
            return await gather_or_cancel(*asked)

    async def _images(self, prompt: Prompt) -> list[bytes]:
        """The encoded images of a prompt. RolloutFault if they cannot be sent."""
        if not prompt.media:
            return []
        if self._spec.api == "sglang" or self._media is None:
            lacks = NO_IMAGES if self._media else "this client has no way to get them"
            raise RolloutFault(self._spec.name, f"prompt {prompt.uid} has images: {lacks}")
        return await self._media.get(prompt.media, prompt.uid)

    def _check_sampled(self, ids: list[int], max_tokens: int) -> None:
        """StageError for more than ``max_tokens``, or for one that the student does not have."""
        known = MAX_TOKEN_ID + 1 if self._spec.vocabulary is None else self._spec.vocabulary
        if len(ids) > max_tokens:
            cause = f"{self._spec.url} answered with {len(ids)} tokens, the most are {max_tokens}"
            raise self._error(cause, CHECK_API)
        if max(ids, default=0) >= known:
            raise self._foreign_token(max(ids), known)

    def _foreign_token(self, token: int, known: int) -> StageError:
        cause = f"{self._spec.url} answered with token {token}, the student has only {known}"
        return self._error(cause, "teachers need the student's tokenizer")

    async def report(self) -> StageReport:
        """The report since the last one."""
        return with_images(self._meter.report(), self._media)

    async def close(self) -> None:
        """Closes the connections."""
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
        """The answer's bytes, at most ``limits`` of them. StageError for any status but 200.

        A redirection is such a status. A call beyond ``concurrency`` waits for a connection. The
        caller bounds the time.
        """
        url = f"{self._spec.url}{path}"
        asked = self._connections().request(method, url, json=body, allow_redirects=False)
        try:
            async with asked as response:
                if response.status != 200:
                    start = (await response.content.read(MAX_SHOWN)).decode(errors="replace")
                    cause = f"{url} answered {response.status}: {' '.join(start.split())}"
                    remedy = REMEDIES.get(response.status, "")
                    if response.status == 404 and path == TOKENS_AND_IMAGES:
                        remedy = SCALE_OUT
                    raise self._error(cause, remedy)
                encoding = response.headers.get("Content-Encoding", "identity")
                if encoding.lower() != "identity":
                    cause = f"{url} answered in {encoding[:MAX_SHOWN]!r}, which no request accepts"
                    raise self._error(cause, "turn the server's compression off")
                return await self._body(url, response, limits)
        except (aiohttp.ClientError, OSError, ValueError) as error:
            found = in_words(error).replace(" ssl:default", "")[:MAX_SHOWN]
            cause = f"{url} cannot be reached: {found}"
            raise self._error(cause, "is the server up, and the URL right?") from error

    async def _body(
        self, url: str, response: aiohttp.ClientResponse, limits: AnswerLimits
    ) -> bytes:
        """Reads the answer. StageError, without its rest, for more than ``limits``."""
        answer, counter = bytearray(), AnswerCounter(limits)
        async for piece in response.content.iter_chunked(READ_BYTES):
            answer += piece
            excess = counter.excess(piece)
            if excess is not None:
                raise self._error(
                    f"{url} answered with {excess}, the limit of the request", CHECK_API
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
        """The result of decoding an answer; StageError where decoding fails."""
        try:
            return reading()
        except UNREADABLE as error:
            found = f"{type(error).__name__}: {str(error)[:MAX_SHOWN]}"
            cause = f"{self._spec.url} answered with JSON that does not fit the request: {found}"
            raise self._error(cause, CHECK_API) from error

    async def _read_offloaded(self, nbytes: int, reading: Callable[[], Result]) -> Result:
        """As ``read``; a large answer in ``READER_THREAD``, after those before it."""
        if nbytes < LARGE:
            return self.read(reading)
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(READER_THREAD, self.read, reading)

    def _error(self, cause: str, remedy: str = "") -> StageError:
        return StageError(self._spec.name, cause, remedy)
