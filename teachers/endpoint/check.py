"""Checks of teachers' servers: they answer, serve the model, have the student's tokens, and see.

``check_endpoints`` runs before anything of a run starts. It checks all servers at the same time,
each within ``health.timeout_s``.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from types import MappingProxyType

import msgspec
import numpy as np

from async_opd.config.run_config import RunConfig
from async_opd.config.sections.teachers import EndpointTeacher
from async_opd.core.batch import Batch
from async_opd.core.errors import Problem, StageError
from async_opd.core.samples import Prompt, Rollout
from async_opd.core.uid import Uid, rollout_uid
from async_opd.media.cache import MediaCache
from async_opd.models.tokenizer import Text
from async_opd.waiting.deadline import gather_or_cancel
from async_opd.waiting.own_loop import run_to_end
from teachers.endpoint.api import SglangApi, TokenId
from teachers.endpoint.replica import MAX_SHOWN, EndpointReplica, endpoint_spec

CHECK = Uid("check")
REMEDY = "its first answer may take long, or it is busy: raise teachers.*.health.timeout_s"
LENGTHS = {"vllm": ("--max-model-len", 1), "sglang": ("--context-length", 7)}
"""By API: the option for a server's maximal length, and by how many tokens a sequence must be
shorter to be scored. vLLM generates one token; SGLang keeps 7."""
TEXT = "The quick brown fox, 0123456789: (x² + 1) = «naïve» 你好!\n"


def check_endpoints(
    config: RunConfig,
    where: str,
    shown: Mapping[str, Prompt] = MappingProxyType({}),
    keys: bool = True,
) -> list[Problem]:
    """The first problem of each of the teachers' servers that has one.

    ``shown`` are prompts with images, by teacher, which its servers have to score. Without ``keys``
    no server is asked that needs one.
    """
    return run_to_end(_check_all(config, where, shown, keys))


async def _check_all(
    config: RunConfig, where: str, shown: Mapping[str, Prompt], keys: bool
) -> list[Problem]:
    checks = [
        _check(config, teacher, name, url, shown.get(name))
        for name, teacher in config.teachers.items()
        if isinstance(teacher, EndpointTeacher) and (keys or teacher.api_key_env is None)
        for url in teacher.urls
    ]
    found = await gather_or_cancel(*checks)
    return [Problem(where, f"teachers.{e.stage}", e.cause, e.remedy) for e in found if e]


async def _check(
    config: RunConfig, teacher: EndpointTeacher, name: str, url: str, shown: Prompt | None
) -> StageError | None:
    async def encoded(hashes: Sequence[str]) -> Mapping[str, bytes]:
        return {} if shown is None else shown.encoded

    replica = EndpointReplica(endpoint_spec(config, teacher, name, url), MediaCache(encoded, 0))
    timeout_s = teacher.health.timeout_s
    try:
        async with asyncio.timeout(timeout_s):
            fault = await _fault(replica, config, teacher, shown)
    except TimeoutError:
        return StageError(name, f"{url} did not answer in {timeout_s:g} s", REMEDY)
    except StageError as error:
        return error
    finally:
        await replica.close()
    return fault and StageError(name, f"{url} {fault[0]}", fault[1])


async def _fault(
    replica: EndpointReplica, config: RunConfig, teacher: EndpointTeacher, shown: Prompt | None
) -> tuple[str, str] | None:
    """The first problem and its remedy: later checks depend on earlier ones.

    Raises StageError for a server that does not answer.
    """
    await replica.ready()
    served = await _served(replica)
    if teacher.served_model not in served:
        found = ", ".join(served)[:MAX_SHOWN] or "nothing"
        return f"serves {found}, not {teacher.served_model}", "set teachers.*.served_model"
    longest, (option, kept) = served[teacher.served_model], LENGTHS[teacher.api]
    wanted = 1 + config.rollout.max_tokens + kept  # a prompt has at least one token
    if longest is not None and longest < wanted:
        most = longest - kept - 1
        remedy = f"at most {most}, or start the server with a larger {option}"
        return f"takes {longest} tokens, rollout.max_tokens needs at least {wanted}", remedy
    text = Text(config.student.model)
    ids = text.plain(TEXT)
    if await _tokens(replica, teacher.served_model) not in (ids, None):
        return "has another tokenizer than the student", "teachers need the student's tokenizer"
    if teacher.api == "sglang":  # as an input, a token that it does not have would stop the server
        known = SglangApi().has(text.size - 1)
        await replica.call("POST", known.path, known.body)
    await replica.score(Batch.pack([_rollout([*ids, text.size - 1])]))
    if shown is not None:
        response = ids[: config.rollout.max_tokens]
        rollout = Rollout.answer(rollout_uid(shown.uid, 0), shown, response, "stop")
        await replica.score(Batch.pack([rollout]))
    return None


class _Model(msgspec.Struct):
    id: str
    max_model_len: int | None = None


class _Models(msgspec.Struct):
    data: list[_Model]


class _TokenizeAnswer(msgspec.Struct):
    tokens: list[TokenId]


async def _served(replica: EndpointReplica) -> dict[str, int | None]:
    """Names of the served models, each with its maximal length or None."""
    answer = await replica.call("GET", "/v1/models")
    models = replica.read(lambda: msgspec.json.decode(answer, type=_Models))
    return {model.id: model.max_model_len for model in models.data}


async def _tokens(replica: EndpointReplica, model: str) -> list[int] | None:
    """The server's tokens of ``TEXT``; None if it does not have this route."""
    body = {"model": model, "prompt": TEXT, "add_special_tokens": False}
    try:
        answer = await replica.call("POST", "/tokenize", body)
    except StageError:
        return None
    return replica.read(lambda: msgspec.json.decode(answer, type=_TokenizeAnswer)).tokens


def _rollout(ids: list[int]) -> Rollout:
    """The first half of the ids as the prompt, the second as the response."""
    half = len(ids) // 2
    prompt = Prompt(CHECK, "check", "check", np.asarray(ids[:half], np.int32))
    return Rollout.answer(rollout_uid(CHECK, 0), prompt, ids[half:], "stop")
