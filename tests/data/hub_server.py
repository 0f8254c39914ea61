"""A hub on this machine: data sets of files in folders, over HTTP as the hub's client asks."""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import unquote

COMMITS = {"main": "a" * 40, "refs/convert/parquet": "b" * 40}
"""The commit of each branch."""


class Hub(ThreadingHTTPServer):
    """``branches``: the folder with the files of ``id@branch``. ``asked`` are downloaded files."""

    def __init__(self, branches: dict[str, Path]) -> None:
        super().__init__(("127.0.0.1", 0), Answer)
        self.branches, self.asked = branches, list[str]()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"

    def found(self, name: str, revision: str) -> tuple[Path | None, str]:
        """A branch's folder, and its commit."""
        for branch, commit in COMMITS.items():
            if revision in (branch, commit):
                return self.branches.get(f"{name}@{branch}"), commit
        return None, ""


class Answer(BaseHTTPRequestHandler):
    """The answer to one request."""

    server: Any

    def do_HEAD(self) -> None:
        self.answer(body=False)

    def do_GET(self) -> None:
        self.answer(body=True)

    def answer(self, body: bool) -> None:
        path = unquote(self.path).partition("?")[0]
        if path.startswith("/api/datasets/"):
            self.info(path.removeprefix("/api/datasets/"))
            return
        name, _, rest = path.removeprefix("/datasets/").partition("/resolve/")
        revision = next(
            (one for pair in COMMITS.items() for one in pair if rest.startswith(one)), ""
        )
        folder, commit = self.server.found(name, revision)
        inner = rest.removeprefix(f"{revision}/")
        if folder is None or not (folder / inner).is_file():
            self.respond(404, b"", {"X-Error-Code": "EntryNotFound"}, body)
            return
        if body:
            self.server.asked.append(inner)
        content = (folder / inner).read_bytes()
        etag = hashlib.sha256(content).hexdigest()
        self.respond(200, content, {"ETag": f'"{etag}"', "X-Repo-Commit": commit}, body)

    def info(self, path: str) -> None:
        name, _, revision = path.partition("/revision/")
        folder, commit = self.server.found(name, revision or "main")
        if folder is None:
            self.respond(404, b"{}", {"X-Error-Code": "RevisionNotFound"}, True)
            return
        names = sorted(str(one.relative_to(folder)) for one in folder.rglob("*") if one.is_file())
        siblings = [{"rfilename": one} for one in names]
        answer = {"id": name, "sha": commit, "siblings": siblings, "tags": [], "private": False}
        self.respond(200, json.dumps(answer).encode(), {"Content-Type": "application/json"}, True)

    def respond(self, status: int, content: bytes, headers: dict[str, str], body: bool) -> None:
        self.send_response(status)
        for key, value in {**headers, "Content-Length": str(len(content))}.items():
            self.send_header(key, value)
        self.end_headers()
        if body:
            self.wfile.write(content)

    def log_message(self, *_: object) -> None:
        """Nothing is printed."""


@contextmanager
def serving(branches: dict[str, Path]) -> Iterator[Hub]:
    """A hub with these folders."""
    hub = Hub(branches)
    threading.Thread(target=hub.serve_forever, daemon=True).start()
    try:
        yield hub
    finally:
        hub.shutdown()
        hub.server_close()
