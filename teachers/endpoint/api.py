"""What servers are asked, and how their JSON becomes arrays of the response positions.

    api      scores from            sampled token and top-k of a position
    vllm     /v1/completions        prompt_logprobs, one object a token of the sequence
    sglang   /generate              input_token_logprobs, input_top_logprobs, from the first row on

Nothing a server says is believed: what does not fit what it was asked raises ValueError, of which
msgspec's errors are a kind. Every request says how long its answer can be, and of how many values
(``AnswerLimits``): while JSON is decoded nothing else runs, and an object of 2 letters takes 70
bytes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal, Protocol, Self

import msgspec
import numpy as np

from async_opd.core.samples import (
    FinishReason,
    Float32,
    Int32,
    Prompt,
    Rollout,
    SampledLogprobs,
    Scores,
    TopK,
)
from async_opd.core.sequence import indices
from async_opd.core.stages import SamplingSpec
from teachers.answers import SLACK, repeated

FRAME_BYTES = 1 << 20
"""Of an answer, beside its entries."""
ENTRY_BYTES = 160
"""Of one token: its id, log-probability, rank and text, with the names of all these."""
TOKEN_BYTES = 256
"""Of a position besides: the text of a token may be long, not that of all the best."""
FRAME_MARKS = 1 << 12
TEXT_MARKS = 64
"""Of a position: brackets, or commas, that are the text of its tokens."""

TokenId = Annotated[int, msgspec.Meta(ge=0, lt=1 << 31)]


@dataclass(frozen=True)
class AnswerLimits:
    """What an answer can have: bytes, ``{`` and ``[``, and commas, those in texts included."""

    nbytes: int = FRAME_BYTES
    opened: int = FRAME_BYTES
    commas: int = FRAME_BYTES

    @classmethod
    def of(cls, tokens: int, top_k: int) -> Self:
        """An honest answer about so many tokens: an entry has one bracket and up to 4 commas."""
        entries = tokens * (top_k + 1)
        texts = FRAME_MARKS + TEXT_MARKS * tokens
        nbytes = FRAME_BYTES + TOKEN_BYTES * tokens + ENTRY_BYTES * entries
        return cls(nbytes, texts + 2 * entries, texts + 5 * entries)


class AnswerCounter:
    """Counts what has come of an answer, against the most that can be meant."""

    def __init__(self, limits: AnswerLimits) -> None:
        self._left = {
            "bytes": limits.nbytes,
            "objects and lists": limits.opened,
            "values": limits.commas,
        }
        self._most = dict(self._left)

    def excess(self, piece: bytes) -> str | None:
        """What there is too much of with this piece."""
        found = (len(piece), piece.count(b"{") + piece.count(b"["), piece.count(b","))
        for what, count in zip(self._left, found, strict=True):
            self._left[what] -= count
            if self._left[what] < 0:
                return f"more than {self._most[what]} {what}"
        return None


@dataclass(frozen=True)
class Request:
    """A path below the server's URL, the JSON body, and the most that an answer can have."""

    path: str
    body: dict[str, Any]
    limits: AnswerLimits


class Api(Protocol):
    """One kind of server."""

    def score(self, rollout: Rollout, top_k: int) -> Request: ...

    def scores(self, answer: bytes, rollout: Rollout, top_k: int) -> Scores: ...

    def sample(self, prompt: Prompt, sampling: SamplingSpec, eos: Sequence[int]) -> Request: ...

    def sampled(self, answer: bytes) -> tuple[list[int], FinishReason]: ...


class _Logprob(msgspec.Struct):
    logprob: float


class _Choice(msgspec.Struct):
    finish_reason: str | None = None
    token_ids: list[TokenId] | None = None
    prompt_logprobs: list[dict[TokenId, _Logprob] | None] | None = None


class _Completion(msgspec.Struct):
    choices: list[_Choice]


class VllmApi:
    """An OpenAI-compatible vLLM server."""

    _decoder = msgspec.json.Decoder(_Completion, strict=False)  # keys are numbers in quotes

    def __init__(self, served_model: str) -> None:
        self._model = served_model

    def score(self, rollout: Rollout, top_k: int) -> Request:
        """Log-probabilities of all tokens up to the last sampled; one token is generated."""
        tokens = _needed(rollout)
        body = {"prompt_logprobs": top_k, "max_tokens": 1, "temperature": 0.0}
        return self._request(AnswerLimits.of(len(tokens), top_k), prompt=tokens, **body)

    def scores(self, answer: bytes, rollout: Rollout, top_k: int) -> Scores:
        """The sampled token comes first, and once only if it is one of the best."""
        rows, expected = self._choice(answer).prompt_logprobs or [], rollout.positions[-1][1]
        if len(rows) != expected:
            raise ValueError(f"log-probabilities of {len(rows)} tokens instead of {expected}")
        sampled: list[float] = []
        best: list[tuple[int, float]] = []
        sampled_at = indices(rollout.positions).tolist()
        for token, at in zip(rollout.response_ids.tolist(), sampled_at, strict=True):
            row = rows[at]
            if row is None or token not in row or not max(1, top_k) <= len(row) <= top_k + 1:
                raise ValueError(f"{len(row or ())} tokens at a position, or not the sampled one")
            sampled.append(row[token].logprob)
            entries = [(other, entry.logprob) for other, entry in row.items()]
            if len(row) == top_k + 1:
                entries = [entry for entry in entries if entry[0] != token]
            best += sorted(entries, key=lambda entry: -entry[1]) if top_k else []
        return scores_of(sampled, [i for i, _ in best], [p for _, p in best], top_k)

    def sample(self, prompt: Prompt, sampling: SamplingSpec, eos: Sequence[int]) -> Request:
        """One answer, as token ids."""
        return self._request(
            AnswerLimits.of(sampling.max_tokens + len(prompt.token_ids), 0),
            prompt=prompt.token_ids.tolist(),
            max_tokens=sampling.max_tokens,
            temperature=sampling.temperature,
            top_p=sampling.top_p,
            stop_token_ids=list(eos),
            return_token_ids=True,
        )

    def sampled(self, answer: bytes) -> tuple[list[int], FinishReason]:
        """The answer's tokens."""
        choice = self._choice(answer)
        if choice.token_ids is None:
            raise ValueError("no token_ids; vLLM returns them since 0.10.2")
        return choice.token_ids, "stop" if choice.finish_reason == "stop" else "length"

    def _request(self, limits: AnswerLimits, **body: Any) -> Request:
        return Request("/v1/completions", {"model": self._model, **body}, limits)

    def _choice(self, answer: bytes) -> _Choice:
        choices = self._decoder.decode(answer).choices
        if len(choices) != 1:
            raise ValueError(f"{len(choices)} choices instead of 1")
        return choices[0]


_Entry = tuple[float | None, TokenId, str | None]


class _Finish(msgspec.Struct):
    type: str


class _Meta(msgspec.Struct):
    finish_reason: _Finish | None = None
    input_token_logprobs: list[_Entry] = []
    input_top_logprobs: list[list[_Entry] | None] = []


class _Generated(msgspec.Struct):
    meta_info: _Meta
    output_ids: list[TokenId] | None = None


class SglangApi:
    """An SGLang server. Not yet run against a real one: tests have answers in its format."""

    _decoder = msgspec.json.Decoder(_Generated)

    def score(self, rollout: Rollout, top_k: int) -> Request:
        """Log-probabilities of the tokens from the first row on; the first one is always empty."""
        tokens = _needed(rollout)
        body = {
            "input_ids": tokens,
            "sampling_params": {"max_new_tokens": 1, "temperature": 0.0},
            "return_logprob": True,
            "logprob_start_len": rollout.rows[0][0],
            "top_logprobs_num": top_k,
        }
        return Request("/generate", body, AnswerLimits.of(len(tokens), top_k))

    def scores(self, answer: bytes, rollout: Rollout, top_k: int) -> Scores:
        """Entries are [log-probability, token, text], one for each token from the first row on."""
        meta = self._decoder.decode(answer).meta_info
        first = rollout.rows[0][0]
        asked = _needed(rollout)[first:]
        tops = meta.input_top_logprobs if top_k else [[]] * len(asked)
        if (len(meta.input_token_logprobs), len(tops)) != (len(asked), len(asked)):
            found = f"{len(meta.input_token_logprobs)} and {len(tops)}"
            raise ValueError(f"log-probabilities of {found} tokens instead of {len(asked)}")
        if [token for _, token, _ in meta.input_token_logprobs[1:]] != asked[1:]:
            raise ValueError("log-probabilities of other tokens than those it was asked for")
        places = (indices(rollout.positions) - first).tolist()
        sampled = [_number(meta.input_token_logprobs[place]) for place in places]
        best = [entry for place in places for entry in (tops[place] or [])[:top_k]]
        if len(best) != len(places) * top_k:
            raise ValueError(f"{len(best)} best tokens instead of {len(places)} times {top_k}")
        return scores_of(sampled, [e[1] for e in best], [_number(e) for e in best], top_k)

    def sample(self, prompt: Prompt, sampling: SamplingSpec, eos: Sequence[int]) -> Request:
        """One answer, as token ids."""
        params = {
            "max_new_tokens": sampling.max_tokens,
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "stop_token_ids": list(eos),
        }
        body = {"input_ids": prompt.token_ids.tolist(), "sampling_params": params}
        limits = AnswerLimits.of(sampling.max_tokens + len(prompt.token_ids), 0)
        return Request("/generate", body, limits)

    def sampled(self, answer: bytes) -> tuple[list[int], FinishReason]:
        """The answer's tokens."""
        generated = self._decoder.decode(answer)
        if generated.output_ids is None:
            raise ValueError("no output_ids")
        finish = generated.meta_info.finish_reason
        return generated.output_ids, "stop" if finish and finish.type == "stop" else "length"


def _needed(rollout: Rollout) -> list[int]:
    """The tokens of the sequence up to the last that the student sampled."""
    return list(rollout.token_ids[: rollout.positions[-1][1]].tolist())


def _number(entry: _Entry) -> float:
    if entry[0] is None:
        raise ValueError(f"no log-probability for token {entry[1]}")
    return entry[0]


def scores_of(sampled: list[float], ids: list[int], logprobs: list[float], top_k: int) -> Scores:
    """SampledLogprobs, or TopK with ``top_k``; no server tells the mass of the rest."""
    own = _logprobs(sampled)
    if not top_k:
        return SampledLogprobs(own)
    shape = (len(sampled), top_k)
    found = np.asarray(ids, np.int32).reshape(shape)  # within it: decoding looks
    again = repeated(found)
    if again is not None:
        raise ValueError(f"token {again[1]} twice among the best of position {again[0]}")
    return TopK(found, _logprobs(logprobs).reshape(shape), own)


def _logprobs(values: list[float]) -> Float32:
    """ValueError for one above 0."""
    highest = max(values, default=0.0)
    if highest > SLACK:
        raise ValueError(f"a log-probability of {highest:g}, which is above 0")
    with np.errstate(over="ignore"):  # -inf is refused with the sample
        return np.asarray(values, np.float32)


def highest_id(scores: Scores) -> int:
    """The largest token id of the teacher's best, -1 without any."""
    ids: Int32 | None = getattr(scores, "ids", None)
    return -1 if ids is None or not ids.size else int(ids.max())


def make_api(api: Literal["vllm", "sglang"], served_model: str) -> Api:
    """The API of the config."""
    return VllmApi(served_model) if api == "vllm" else SglangApi()
