"""A server of wandb on the loopback: the few routes that its client calls for a run's rows.

    POST /graphql                        RunResumeStatus, UpsertBucket, CreateRunFiles, others
    POST /files/<entity>/<project>/<run>/file_stream     rows, by their offset in a file
    PUT  /upload/<file>                  files that the client sends beside the rows

Read off the requests of wandb 0.31, whose own server is not public.
"""

from __future__ import annotations

import gzip
import json
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

HISTORY, EVENTS, SUMMARY = "wandb-history.jsonl", "wandb-events.jsonl", "wandb-summary.json"
PATIENCE_S = 120.0


@dataclass
class HostedRun:
    """The server's record of a run: lines of its files by their offset."""

    files: dict[str, dict[int, str]] = field(default_factory=dict)
    complete: bool = False

    def add(self, files: dict[str, Any]) -> None:
        """Lines from an offset on; those that are there already are replaced."""
        for name, part in files.items():
            lines = self.files.setdefault(name, {})
            lines |= dict(enumerate(part["content"], part["offset"]))

    @property
    def rows(self) -> list[dict[str, Any]]:
        """The logged rows, in the order of their offsets."""
        lines = self.files.get(HISTORY, {})
        return [json.loads(lines[offset]) for offset in sorted(lines)]

    def tail(self, name: str) -> str:
        """The last line of a file, as a list in JSON."""
        lines = self.files.get(name, {})
        return json.dumps([lines[max(lines)]] if lines else [])


class WandbServer:
    """``runs`` by id. While ``away`` it ends every connection without an answer and counts it."""

    def __init__(self) -> None:
        self.runs: dict[str, HostedRun] = {}
        self.away = False
        self.refused = 0
        self._changed = threading.Condition()
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), self._handler())
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}"

    @contextmanager
    def serving(self) -> Iterator[WandbServer]:
        """Answers in a thread."""
        thread = threading.Thread(target=self._server.serve_forever, daemon=True)
        thread.start()
        try:
            yield self
        finally:
            self._server.shutdown()
            self._server.server_close()
            thread.join()

    def until(self, holds: Callable[[], bool]) -> None:
        """Waits until a request has made it hold."""
        with self._changed:
            assert self._changed.wait_for(holds, PATIENCE_S), f"{self.runs}, {self.refused} refused"

    def answer(self, path: str, body: bytes) -> dict[str, Any]:
        """The answer to a request, which it keeps."""
        if path == "/graphql":
            asked = json.loads(body)
            return {"data": self._graphql(asked["query"], asked["variables"])}
        if path.endswith("/file_stream"):
            content = json.loads(body)
            run = self.runs[path.split("/")[-2]]
            run.add(content.get("files") or {})
            run.complete |= bool(content.get("complete"))
        return {}

    def _graphql(self, query: str, given: dict[str, Any]) -> dict[str, Any]:
        entity = {"id": "e", "name": "entity"}
        project = {"id": "p", "name": given.get("project"), "entity": entity}
        if "upsertBucket" in query:
            bucket = {"id": "b", "name": given["name"], "project": project, "config": "{}"}
            bucket |= {"displayName": given["displayName"], "description": "", "sweepName": None}
            new = given["name"] not in self.runs
            run = self.runs.setdefault(given["name"], HostedRun())
            lines = len(run.files.get(HISTORY, {}))
            return {
                "upsertBucket": {"bucket": bucket | {"historyLineCount": lines}, "inserted": new}
            }
        if "RunResumeStatus" in query:
            return {"model": project | {"bucket": self._resumed(given["name"])}}
        if "createRunFiles" in query:
            files = [
                {"name": name, "uploadUrl": f"{self.url}/upload/{name}"} for name in given["files"]
            ]
            return {"createRunFiles": {"runID": "b", "uploadHeaders": [], "files": files}}
        return {"entity": {"organization": {"coreWeaveOrganizationId": None}}}

    def _resumed(self, name: str) -> dict[str, Any] | None:
        """The answer by which a client goes on in a run; None for an unknown run."""
        if (run := self.runs.get(name)) is None:
            return None
        counts = {
            "historyLineCount": len(run.files.get(HISTORY, {})),
            "eventsLineCount": len(run.files.get(EVENTS, {})),
            "logLineCount": 0,
        }
        tails = {"historyTail": run.tail(HISTORY), "eventsTail": run.tail(EVENTS)}
        summary = json.loads(run.tail(SUMMARY))
        texts = {"summaryMetrics": summary[0] if summary else "{}", "config": "{}"}
        named = {"id": "b", "name": name, "displayName": name, "tags": [], "notes": None}
        return {**named, **counts, **tails, **texts, "wandbConfig": '{"t": 1}'}

    def _handler(self) -> type[BaseHTTPRequestHandler]:
        server = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def answer(self) -> None:
                body = self.rfile.read(int(self.headers.get("content-length") or 0))
                if self.headers.get("content-encoding") == "gzip":
                    body = gzip.decompress(body)
                with server._changed:
                    if server.away:
                        server.refused += 1
                        server._changed.notify_all()
                        self.close_connection = True
                        self.connection.shutdown(socket.SHUT_RDWR)
                        return
                    content = json.dumps(server.answer(self.path, body)).encode()
                    server._changed.notify_all()
                self.send_response(200)
                self.send_header("content-type", "application/json")
                self.send_header("content-length", str(len(content)))
                self.end_headers()
                self.wfile.write(content)

            do_GET = do_POST = do_PUT = answer  # noqa: N815 (the names of http.server)

            def log_message(self, *_: object) -> None: ...

        return Handler
