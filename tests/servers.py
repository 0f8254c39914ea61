"""A real OpenAI-compatible vLLM server on loopback."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

import psutil

from async_opd.models.engine_args import engine_env

UP_S = 240
ENV = {**os.environ, **engine_env("cpu"), "TORCHDYNAMO_DISABLE": "1"}
"""Without a compiler run at the first request for log-probabilities."""


class VllmServer:
    """Serves a model on a separate port; ``start`` again after ``kill`` takes the same port."""

    def __init__(self, model: Path, name: str, key: str, log: Path, *more: str) -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self._port = int(free.getsockname()[1])
        self.url = f"http://127.0.0.1:{self._port}"
        self._log = log
        self._command = [
            *(sys.executable, "-m", "vllm.entrypoints.openai.api_server"),
            *("--model", str(model), "--served-model-name", name, "--api-key", key),
            *("--host", "127.0.0.1", "--port", str(self._port), "--max-logprobs", "17"),
            *("--dtype", "float32", "--enforce-eager", "--block-size", "32"),
            *("--kv-cache-memory-bytes", str(64 << 20), *more),
        ]
        self.process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Starts the server; ``wait`` until it answers."""
        with self._log.open("ab") as log:
            self.process = subprocess.Popen(self._command, stdout=log, stderr=log, env=ENV)

    def wait(self) -> None:
        """Returns when the server is healthy."""
        deadline = time.monotonic() + UP_S
        while not self._healthy():
            assert self.process is not None
            assert self.process.poll() is None, self._log.read_text()
            assert time.monotonic() < deadline, self._log.read_text()
            time.sleep(0.2)

    def kill(self) -> None:
        """kill -9, with its engine: that would outlive it."""
        if self.process is not None and self.process.poll() is None:
            server = psutil.Process(self.process.pid)
            for process in (server, *server.children(recursive=True)):
                process.kill()
            self.process.wait()

    def _healthy(self) -> bool:
        try:
            with urllib.request.urlopen(f"{self.url}/health", timeout=5) as answer:
                return bool(answer.status == 200)
        except OSError:
            return False
