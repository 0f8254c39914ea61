"""A teacher's server that answers what it likes, at every path that a run asks.

app = hostile(answer, headers=…, status=…)       the same answer to everything
heard                                            what it was asked, for tests to look at
"""

from __future__ import annotations

import gzip
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from functools import cache

from aiohttp import web
from aiohttp.test_utils import TestServer

ZEROS = 16 << 20


@dataclass
class Hostile:
    """Its answer to whatever it is asked, but for ``/health`` and what ``instead`` names.

    ``endless`` sends the answer again and again. ``heard`` are the paths and headers of requests.
    """

    answer: bytes = b""
    status: int = 200
    headers: dict[str, str] = field(default_factory=dict)
    endless: bool = False
    instead: dict[str, bytes] = field(default_factory=dict)
    heard: list[tuple[str, dict[str, str]]] = field(default_factory=list)
    sent: int = 0

    async def handle(self, request: web.Request) -> web.StreamResponse:
        self.heard.append((request.path, dict(request.headers)))
        if request.path == "/health":
            return web.Response()
        if request.path in self.instead:
            return web.Response(body=self.instead[request.path])
        response = web.StreamResponse(status=self.status, headers=self.headers)
        await response.prepare(request)
        try:
            await self._send(response)
        except ConnectionError:  # the other side closed it
            return response
        await response.write_eof()
        return response

    async def _send(self, response: web.StreamResponse) -> None:
        while True:
            await response.write(self.answer)
            self.sent += len(self.answer)
            if not self.endless:
                return


@asynccontextmanager
async def serving(server: Hostile) -> AsyncIterator[str]:
    """Its URL."""
    app = web.Application(client_max_size=1 << 30)
    app.router.add_route("*", "/{path:.*}", server.handle)
    async with TestServer(app) as running:
        yield str(running.make_url("")).rstrip("/")


@cache
def bomb() -> bytes:
    """Few bytes, which are ``ZEROS`` when they are decompressed."""
    return gzip.compress(
        b"[" + b"0," * (ZEROS // 2) + b"0]", 9, mtime=0
    )  # the same in every process


def deep(levels: int = 200_000) -> bytes:
    """JSON in JSON in JSON, in a key that nobody asked for."""
    return b'{"x": ' + b"[" * levels + b"]" * levels + b', "choices": []}'


def completion(rows: list[object], **choice: object) -> bytes:
    """An answer of ``/v1/completions``."""
    return json.dumps({"choices": [{"prompt_logprobs": rows, **choice}]}).encode()
