"""Servers are asked before a run starts: is it the model, does it know the student's tokens?"""

from __future__ import annotations

import asyncio
import base64
import hashlib
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from async_opd.checks.endpoint_probes import endpoint_probes
from async_opd.checks.preflight import Inputs
from async_opd.config.load import load_config
from async_opd.core.errors import Problem
from async_opd.core.row import Media, Row
from async_opd.models.tokenizer import Text
from teachers.endpoint.check import check_endpoints
from tests.data.pictures import picture
from tests.teachers.test_endpoint import entry, sglang_server, vllm_answer

EXAMPLE = Path(__file__).parents[2] / "examples" / "quickstart.yaml"
STUDENT = Text(EXAMPLE.parent / "quickstart" / "models" / "student")


@dataclass
class Server:
    """A vLLM server that works, until a field is changed."""

    model: dict[str, Any] = field(default_factory=lambda: {"id": "sorter", "max_model_len": 128})
    shift: int = 0
    tokenizes: bool = True
    hangs: bool = False
    most_logprobs: int = 20
    scales_out: bool = True
    api: str = "vllm"
    sent: list[Any] = field(default_factory=list)

    async def health(self, request: web.Request) -> web.Response:
        if self.hangs:
            await asyncio.sleep(60)
        return web.Response()

    async def models(self, request: web.Request) -> web.Response:
        return web.json_response({"object": "list", "data": [self.model]})

    async def tokenize(self, request: web.Request) -> web.Response:
        if not self.tokenizes:
            return web.Response(status=404)
        tokens = STUDENT.plain((await request.json())["prompt"])
        return web.json_response({"tokens": [token + self.shift for token in tokens]})

    async def complete(self, request: web.Request) -> web.Response:
        body = await request.json()
        if body["prompt_logprobs"] > self.most_logprobs:
            return web.Response(status=400, text="greater than max allowed")
        best = {str(i): entry(-1.0 - i) for i in range(body["prompt_logprobs"])}
        rows = [{str(token): entry(-9)} | best for token in body["prompt"]]
        return web.Response(body=vllm_answer([None, *rows[1:]]))

    async def generate(self, request: web.Request) -> web.Response:
        """Answers behind one image, for which it computes four tokens."""
        if not self.scales_out:
            return web.Response(status=404)
        body = await request.json()
        self.sent.append(body["content_parts"])
        best = {str(i): entry(-1.0 - i) for i in range(body["sampling_params"]["prompt_logprobs"])}
        rows = [{str(token): entry(-9)} | best for token in body["token_ids"]]
        answer = {"choices": [{"token_ids": [1]}], "prompt_logprobs": [None] * 3 + rows}
        return web.json_response(answer)


@dataclass
class Sglang(Server):
    """An SGLang server; a token of the input beyond its vocabulary stops it."""

    vocabulary: int = STUDENT.size
    api: str = "sglang"

    async def native(self, request: web.Request) -> web.Response:
        """Answers ``/generate``."""
        body = await request.json()
        self.sent.append(body)
        if (token := body.get("token_ids_logprob", [0])[0]) >= self.vocabulary:
            return web.Response(status=400, text=f"out-of-vocabulary token id {token}")
        if "top_logprobs_num" not in body:
            return web.json_response({"meta_info": {}, "output_ids": [0]})
        if max(body["input_ids"]) >= self.vocabulary and request.transport is not None:
            request.transport.close()
        return web.Response(body=sglang_server(body, last=self.vocabulary - 1))


@asynccontextmanager
async def running(server: Server) -> AsyncIterator[str]:
    app = web.Application()
    app.router.add_get("/health", server.health)
    app.router.add_get("/v1/models", server.models)
    app.router.add_post("/tokenize", server.tokenize)
    app.router.add_post("/v1/completions", server.complete)
    app.router.add_post("/inference/v1/generate", server.generate)
    if isinstance(server, Sglang):
        app.router.add_post("/generate", server.native)
    async with TestServer(app) as http:
        yield str(http.make_url("")).rstrip("/")


async def found(server: Server, timeout_s: float = 30.0) -> list[Problem]:
    async with running(server) as url:
        teacher = {
            "kind": "endpoint",
            "urls": [url],
            "served_model": "sorter",
            "api": server.api,
        }
        health = {"health": {"timeout_s": timeout_s}}
        config = load_config(EXAMPLE, [f"teachers.sort={json.dumps(teacher | health)}"])
        return await asyncio.to_thread(check_endpoints, config, "c.yaml")


async def one(server: Server, timeout_s: float) -> Problem:
    (problem,) = await found(server, timeout_s)
    assert problem.key == "teachers.sort"
    return problem


@pytest.mark.parametrize("kind", [Server, Sglang])
@pytest.mark.parametrize("tokenizes", [True, False])
async def test_a_server_of_the_model_has_no_problem_also_without_a_tokenizer(
    kind: type[Server], tokenizes: bool
) -> None:
    assert await found(kind(tokenizes=tokenizes)) == []


@pytest.mark.parametrize(
    ("fault", "cause", "remedy"),
    [
        ({"model": {"id": "other"}}, "serves other, not sorter", ""),
        (
            {"model": {"id": "sorter", "max_model_len": 9}},
            "takes 9 tokens, rollout.max_tokens needs at least 10",
            "",
        ),
        ({"shift": 1}, "another tokenizer", ""),
        ({"most_logprobs": 5}, "greater than max allowed", "--max-logprobs"),
        ({"hangs": True}, "did not answer in 0.2 s", ""),
    ],
    ids=["another model", "too short", "another tokenizer", "too few of the best", "hangs"],
)
async def test_a_server_that_cannot_be_the_teacher_is_refused_with_the_cause(
    fault: dict[str, Any], cause: str, remedy: str
) -> None:
    problem = await one(Server(**fault), timeout_s=0.2 if "hangs" in fault else 30)
    assert cause in problem.message
    assert remedy in problem.remedy


async def test_an_sglang_server_needs_seven_positions_beyond_the_longest_sequence() -> None:
    assert await found(Sglang(model={"id": "sorter", "max_model_len": 16})) == []
    problem = await one(Sglang(model={"id": "sorter", "max_model_len": 15}), timeout_s=30)
    assert "takes 15 tokens, rollout.max_tokens needs at least 16" in problem.message
    assert "at most 7" in problem.remedy
    assert "--context-length" in problem.remedy


async def test_an_sglang_server_without_the_students_last_token_is_refused_and_not_stopped() -> (
    None
):
    server = Sglang(vocabulary=STUDENT.size - 1)
    problem = await one(server, timeout_s=30)
    assert "out-of-vocabulary" in problem.message
    assert max(token for body in server.sent for token in body["input_ids"]) < server.vocabulary


def test_a_server_that_is_not_there_is_refused() -> None:
    teacher = {"kind": "endpoint", "urls": ["http://127.0.0.1:9"], "served_model": "sorter"}
    config = load_config(EXAMPLE, [f"teachers.sort={json.dumps(teacher)}"])
    (problem,) = check_endpoints(config, "c.yaml")
    assert "127.0.0.1:9/health cannot be reached: Cannot connect" in problem.message
    assert "ssl" not in problem.message


# ── servers of a VLM teacher ───────────────────────────────────────────────────────────────────

VISION = EXAMPLE.with_name("vision.yaml")
SEEN = picture(96, 64)


def row(at: int, source: str, encoded: bytes | None = None) -> Row:
    """A row of that data source, with this image if there is one."""
    messages: list[Any] = [{"role": "user", "content": [{"type": "text", "text": "1"}]}]
    if encoded is None:
        return Row(f"0:{at}", source, messages, None, {})
    media = Media(hashlib.sha256(encoded).hexdigest(), len(encoded), 96, 64)
    messages[0]["content"].append({"type": "image", "image": media.sha256})
    images: Any = {"images": (media,), "encoded": {media.sha256: encoded}}
    return Row(f"0:{at}", source, messages, None, {}, **images)


async def found_by_rows(server: Server, *rows: Row) -> list[Problem]:
    async with running(server) as url:
        teacher = {
            "kind": "endpoint",
            "urls": [url],
            "served_model": "sorter",
            "sources": ["count"],
        }
        others = {"kind": "vllm", "model": "/none", "sources": ["larger", "digit", "sort"]}
        both = json.dumps({"sees": teacher, "other": others})
        config = load_config(VISION, [f"teachers={both}"])
        shown = endpoint_probes(config, Inputs(eval=[rows]))
        return await asyncio.to_thread(check_endpoints, config, "c.yaml", shown)


@pytest.fixture
def seeing() -> Server:
    """A server with the tokens of the VLM student."""
    pytest.importorskip("torchvision")
    return Server(tokenizes=False)


async def test_a_server_is_sent_the_first_image_of_its_teachers_rows(seeing: Server) -> None:
    rows = [row(0, "larger", picture()), row(1, "count", SEEN), row(2, "count", picture())]
    assert await found_by_rows(seeing, *rows) == []
    (parts,) = seeing.sent
    (part,) = parts
    assert base64.b64decode(part["url"].partition(",")[2]) == SEEN


async def test_a_server_that_takes_no_images_is_refused_before_the_start(seeing: Server) -> None:
    seeing.scales_out = False
    (problem,) = await found_by_rows(seeing, row(0, "count", SEEN))
    assert "/inference/v1/generate answered 404" in problem.message
    assert "--enable-scale-out" in problem.remedy


async def test_a_server_whose_teacher_gets_text_is_sent_no_image(seeing: Server) -> None:
    seeing.scales_out = False
    assert await found_by_rows(seeing, row(0, "larger", SEEN), row(1, "count")) == []
