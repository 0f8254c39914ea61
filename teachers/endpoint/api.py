"""Requests to servers, and their JSON answers as arrays of the response positions.

    api      scores from             sampled token and top-k of a position
    vllm     /v1/completions         prompt_logprobs, one object a token of the sequence
             /inference/v1/generate  the same behind images, which it takes as data URLs
    sglang   /generate               input_token_logprobs, input_top_logprobs, from the first row on

An answer with another ``finish_reason`` than stop and length was cut: it is refused.

No answer is trusted: one that does not fit its request raises ValueError (msgspec's errors are of
that kind). Every request bounds the bytes and values of its answer (``AnswerLimits``), because
decoding JSON blocks the process, and an object of 2 letters takes 70 bytes once decoded.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal, Self

import msgspec
import numpy as np

from async_opd.core.samples import FinishReason, Prompt, Rollout
from async_opd.core.scores import SampledLogprobs, Scores, TopK
from async_opd.core.sequence import Float32, Int32, indices
from async_opd.core.stages import SamplingSpec
from async_opd.media.decode import data_url
from teachers.answers import SLACK, repeated

FRAME_BYTES = 1 << 20
"""Bytes of an answer beside its entries."""
ENTRY_BYTES = 160
"""Bytes of one token: its id, log-probability, rank and text, with the names of these fields."""
TOKEN_BYTES = 256
"""Further bytes of a position: one token's text may be long, not the text of all the best."""
FRAME_MARKS = 1 << 12
"""Brackets, or commas, of an answer beside its entries."""
TEXT_MARKS = 64
"""Brackets, or commas, in the text of a position's tokens."""

TOKENS_AND_IMAGES = "/inference/v1/generate"
"""vLLM's path for token ids and images."""
EXCLUDED = -100.0  # a bias that leaves a token no probability: JSON has no infinity
NO_IMAGES = "SGLang's API was not compared on images: serve the teacher by vLLM"

TokenId = Annotated[int, msgspec.Meta(ge=0, lt=1 << 31)]


@dataclass(frozen=True)
class AnswerLimits:
    """Maximal number of bytes, of ``{`` and ``[``, and of commas; those in texts count too."""

    nbytes: int = FRAME_BYTES
    opened: int = FRAME_BYTES
    commas: int = FRAME_BYTES

    @classmethod
    def of(cls, tokens: int, top_k: int) -> Self:
        """Limits of an answer about so many tokens: an entry has one bracket and up to 4 commas."""
        entries = tokens * (top_k + 1)
        texts = FRAME_MARKS + TEXT_MARKS * tokens
        nbytes = FRAME_BYTES + TOKEN_BYTES * tokens + ENTRY_BYTES * entries
        return cls(nbytes, texts + 2 * entries, texts + 5 * entries)


class AnswerCounter:
    """Compares the part of an answer that has arrived with the limits."""

    def __init__(self, limits: AnswerLimits) -> None:
        self._limits = (limits.nbytes, limits.opened, limits.commas)
        self._found = [0, 0, 0]

    def excess(self, piece: bytes) -> str | None:
        """The limit that the answer exceeds with this piece, in words; None if it exceeds none."""
        counts = (len(piece), piece.count(b"{") + piece.count(b"["), piece.count(b","))
        self._found = [found + more for found, more in zip(self._found, counts, strict=True)]
        whats = ("bytes", "objects and lists", "values")
        for what, found, limit in zip(whats, self._found, self._limits, strict=True):
            if found > limit:
                return f"more than {limit} {what}"
        return None


@dataclass(frozen=True)
class Request:
    """A path below the server's URL, the JSON body, and the limits of the answer."""

    path: str
    body: dict[str, Any]
    limits: AnswerLimits


class _Logprob(msgspec.Struct):
    logprob: float


class _Choice(msgspec.Struct):
    finish_reason: Literal[FinishReason, "repetition"] | None = None
    token_ids: list[TokenId] | None = None
    prompt_logprobs: list[dict[TokenId, _Logprob] | None] | None = None


class _Completion(msgspec.Struct):
    choices: list[_Choice]
    prompt_logprobs: list[dict[TokenId, _Logprob] | None] | None = None


class VllmApi:
    """An OpenAI-compatible vLLM server.

    Its completions take no images, and its chat no token ids of a response: prompts with images go
    to the API of ``--enable-scale-out``, which expands placeholders as its engine does.
    """

    _decoder = msgspec.json.Decoder(_Completion, strict=False)  # keys are numbers in quotes

    def __init__(self, served_model: str) -> None:
        self._model = served_model

    def score(self, rollout: Rollout, top_k: int, images: Sequence[bytes] = ()) -> Request:
        """Asks for log-probabilities of all tokens up to the last sampled one.

        ``images`` are the encoded ones of the prompt, which has a placeholder for each. The server
        also generates one token, the fewest that it accepts.
        """
        tokens = _needed(rollout)
        body = {"prompt_logprobs": top_k, "max_tokens": 1, "temperature": 0.0}
        limits = AnswerLimits.of(len(tokens) + _most_tokens(rollout.prompt), top_k)
        if images:
            return self._seeing(tokens, images, limits, body)
        return self._request(limits, prompt=tokens, **body)

    def scores(self, answer: bytes, rollout: Rollout, top_k: int) -> Scores:
        """Scores of the sampled positions. ValueError if the answer lacks one, or k best at it.

        A row lists the sampled token and the k best: k entries where it is one of them, else k + 1.
        Behind images there are more rows than tokens asked for, which has one token an image.
        """
        completion, media = self._completion(answer), rollout.prompt.media
        found = completion.prompt_logprobs if media else completion.choices[0].prompt_logprobs
        rows, expected = found or [], rollout.positions[-1][1]
        if len(rows) < expected or (len(rows) > expected and not media):
            raise ValueError(f"log-probabilities of {len(rows)} tokens instead of {expected}")
        rows = rows[len(rows) - expected :]
        sampled: list[float] = []
        best: list[tuple[int, float]] = []
        sampled_at = indices(rollout.positions).tolist()
        for token, at in zip(rollout.response_ids.tolist(), sampled_at, strict=True):
            row = rows[at]
            if row is None or token not in row or not max(1, top_k) <= len(row) <= top_k + 1:
                count = len(row or ())
                raise ValueError(f"{count} tokens at position {at}, or not the sampled {token}")
            sampled.append(row[token].logprob)
            entries = [(other, entry.logprob) for other, entry in row.items()]
            if len(row) == top_k + 1:
                entries = [entry for entry in entries if entry[0] != token]
            best += sorted(entries, key=lambda entry: -entry[1]) if top_k else []
        return scores_of(sampled, [i for i, _ in best], [p for _, p in best], top_k)

    def sample(
        self,
        prompt: Prompt,
        sampling: SamplingSpec,
        eos: Sequence[int],
        images: Sequence[bytes] = (),
        never: Sequence[int] = (),
    ) -> Request:
        """Asks for one response, as token ids; behind images without tokens of ``never``."""
        tokens = prompt.token_ids.tolist()
        limits = AnswerLimits.of(sampling.max_tokens + len(tokens), 0)
        body = {
            "max_tokens": sampling.max_tokens,
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "stop_token_ids": list(eos),
        }
        if images:
            bias = {"logit_bias": {str(one): EXCLUDED for one in never}}
            return self._seeing(tokens, images, limits, body | bias)
        return self._request(limits, prompt=tokens, **body, return_token_ids=True)

    def sampled(self, answer: bytes) -> tuple[list[int], FinishReason]:
        """The response's tokens, and why it ended."""
        choice = self._completion(answer).choices[0]
        if choice.token_ids is None:
            raise ValueError("no token_ids; vLLM returns them since 0.10.2")
        return choice.token_ids, "stop" if choice.finish_reason == "stop" else "length"

    def _request(self, limits: AnswerLimits, **body: Any) -> Request:
        return Request("/v1/completions", {"model": self._model, **body}, limits)

    def _seeing(
        self, tokens: list[int], images: Sequence[bytes], limits: AnswerLimits, sampling: Any
    ) -> Request:
        """A request whose tokens have one placeholder an image."""
        body = {
            "model": self._model,
            "token_ids": tokens,
            "content_parts": [{"type": "image_url", "url": data_url(one)} for one in images],
            "sampling_params": sampling,
        }
        return Request(TOKENS_AND_IMAGES, body, limits)

    def _completion(self, answer: bytes) -> _Completion:
        completion = self._decoder.decode(answer)
        if len(completion.choices) != 1:
            raise ValueError(f"{len(completion.choices)} choices instead of 1")
        return completion


_Entry = tuple[float | None, TokenId, str | None]


class _Finish(msgspec.Struct):
    type: FinishReason


class _Meta(msgspec.Struct):
    finish_reason: _Finish | None = None
    input_token_logprobs: list[_Entry] = []
    input_top_logprobs: list[list[_Entry] | None] = []


class _Generated(msgspec.Struct):
    meta_info: _Meta
    output_ids: list[TokenId] | None = None


class SglangApi:
    """An SGLang server.

    A request with a token beyond its vocabulary, or for more best tokens than it has, stops it.
    """

    _decoder = msgspec.json.Decoder(_Generated)

    def score(self, rollout: Rollout, top_k: int, images: Sequence[bytes] = ()) -> Request:
        """Asks for log-probabilities of the tokens from the first row on. ValueError for images.

        The first of them has none: the server has no row that predicts it.
        """
        if images:
            raise ValueError(NO_IMAGES)
        tokens = _needed(rollout)
        body = {
            "input_ids": tokens,
            "sampling_params": {"max_new_tokens": 1, "temperature": 0.0},
            "return_logprob": True,
            "logprob_start_len": rollout.rows[0][0],
            "top_logprobs_num": top_k,
        }
        return Request("/generate", body, AnswerLimits.of(len(tokens) + 1, top_k))

    def has(self, token: int) -> Request:
        """Asks for the log-probability of one token after token 0.

        A server without that token refuses the request before it computes.
        """
        body = {
            "input_ids": [0],
            "sampling_params": {"max_new_tokens": 1, "temperature": 0.0},
            "return_logprob": True,
            "token_ids_logprob": [token],
        }
        return Request("/generate", body, AnswerLimits())

    def scores(self, answer: bytes, rollout: Rollout, top_k: int) -> Scores:
        """Scores of the sampled positions. ValueError if the answer is about other tokens.

        Entries are [log-probability, token, text], one for each token from the first row on.
        """
        meta = self._decoder.decode(answer).meta_info
        first = rollout.rows[0][0]
        asked = _needed(rollout)[first:]
        tops = meta.input_top_logprobs if top_k else [[]] * len(asked)
        if (len(meta.input_token_logprobs), len(tops)) != (len(asked), len(asked)):
            found = f"{len(meta.input_token_logprobs)} and {len(tops)}"
            raise ValueError(f"log-probabilities of {found} tokens instead of {len(asked)}")
        reported = [token for _, token, _ in meta.input_token_logprobs[1:]]
        last = max(asked)  # SGLang calls the last token of its vocabulary 0
        if any(a != b and (a, b) != (0, last) for a, b in zip(reported, asked[1:], strict=True)):
            raise ValueError("log-probabilities of other tokens than those of the request")
        places = (indices(rollout.positions) - first).tolist()
        sampled = [_number(meta.input_token_logprobs[place]) for place in places]
        best = [entry for place in places for entry in (tops[place] or [])[:top_k]]
        if len(best) != len(places) * top_k:
            raise ValueError(f"{len(best)} best tokens instead of {len(places)} times {top_k}")
        return scores_of(sampled, [e[1] for e in best], [_number(e) for e in best], top_k)

    def sample(
        self,
        prompt: Prompt,
        sampling: SamplingSpec,
        eos: Sequence[int],
        images: Sequence[bytes] = (),
        never: Sequence[int] = (),
    ) -> Request:
        """Asks for one response, as token ids. ValueError for images."""
        if images:
            raise ValueError(NO_IMAGES)
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
        """The response's tokens, and why it ended."""
        generated = self._decoder.decode(answer)
        if generated.output_ids is None:
            raise ValueError("no output_ids")
        finish = generated.meta_info.finish_reason
        return generated.output_ids, finish.type if finish else "length"


Api = VllmApi | SglangApi


def _needed(rollout: Rollout) -> list[int]:
    """The tokens of the sequence up to the last that the student sampled."""
    return list(rollout.token_ids[: rollout.positions[-1][1]].tolist())


def _most_tokens(prompt: Prompt) -> int:
    """More tokens than any processor makes of the prompt's images."""
    return sum(8192 + image.width * image.height // 64 for image in prompt.media)


def _number(entry: _Entry) -> float:
    if entry[0] is None:
        raise ValueError(f"no log-probability for token {entry[1]}")
    return entry[0]


def scores_of(sampled: list[float], ids: list[int], logprobs: list[float], top_k: int) -> Scores:
    """SampledLogprobs, or TopK with ``top_k``; no server returns the mass of the rest."""
    own = _logprobs(sampled)
    if not top_k:
        return SampledLogprobs(own)
    shape = (len(sampled), top_k)
    found = np.asarray(ids, np.int32).reshape(shape)  # ``TokenId`` keeps them within int32
    if (twice := repeated(found)) is not None:
        raise ValueError(f"token {twice[1]} twice among the best of position {twice[0]}")
    return TopK(found, _logprobs(logprobs).reshape(shape), own)


def _logprobs(values: list[float]) -> Float32:
    """Float32 of the values. ValueError for one above 0 by more than rounding."""
    highest = max(values, default=0.0)
    if highest > SLACK:
        raise ValueError(f"a log-probability of {highest:g}, which is above 0")
    with np.errstate(over="ignore"):  # ``Sample`` refuses -inf
        return np.asarray(values, np.float32)


def highest_id(scores: Scores) -> int:
    """The largest token id among the teacher's best; -1 for scores without any."""
    ids: Int32 | None = getattr(scores, "ids", None)
    return -1 if ids is None or not ids.size else int(ids.max())


def make_api(api: Literal["vllm", "sglang"], served_model: str) -> Api:
    """The API that the config names."""
    return VllmApi(served_model) if api == "vllm" else SglangApi()
