"""Real servers on loopback: OpenAI-compatible vLLM, and SGLang."""

from __future__ import annotations

import os
import random
import subprocess
import sys
import time
import urllib.request
from collections.abc import Mapping, Sequence
from pathlib import Path

import psutil
import pytest

from async_opd.models.engine_args import engine_env
from async_opd.processes.listening import listening_socket

UP_S = 240
ENV = {**os.environ, **engine_env("cpu"), "TORCHDYNAMO_DISABLE": "1"}
"""Without a compiler run at the first request for log-probabilities."""
SGLANG = Path(__file__).parents[1] / ".venv-sglang"
SGLANG_ENV = {
    **os.environ,
    "SGLANG_USE_CPU_ENGINE": "1",
    "SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN": "1",
    "OMP_NUM_THREADS": "1",
}
"""SGLang takes no sequence of a model's full length without a longer context length."""


def free_port() -> int:
    """A port below those of outgoing connections: the server finds it free when it starts."""
    first = random.SystemRandom().randrange(20_000, 32_000)  # not that of a server beside it
    with listening_socket("127.0.0.1", range(first, 32_768)) as free:
        return int(free.getsockname()[1])


class Server:
    """Serves a model on a separate port; ``start`` again after ``kill`` takes the same port."""

    def __init__(self, log: Path, command: Sequence[str], env: Mapping[str, str]) -> None:
        self._port = free_port()
        self.url = f"http://127.0.0.1:{self._port}"
        self._log = log
        self._command = [*command, "--host", "127.0.0.1", "--port", str(self._port)]
        self._env = env
        self.process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Starts the server; ``wait`` until it answers."""
        with self._log.open("ab") as log:
            self.process = subprocess.Popen(self._command, stdout=log, stderr=log, env=self._env)

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


class VllmServer(Server):
    """An OpenAI-compatible vLLM server."""

    def __init__(self, model: Path, name: str, key: str, log: Path, *more: str) -> None:
        command = [
            *(sys.executable, "-m", "vllm.entrypoints.openai.api_server"),
            *("--model", str(model), "--served-model-name", name, "--api-key", key),
            *("--max-logprobs", "17"),
            *("--dtype", "float32", "--enforce-eager", "--block-size", "32"),
            *("--kv-cache-memory-bytes", str(64 << 20), *more),
        ]
        super().__init__(log, command, ENV)


class SglangServer(Server):
    """An SGLang server, of an environment that only ``make test-sglang`` makes.

    It computes a prompt in chunks of 32 tokens. Without the environment the test is skipped.
    """

    def __init__(self, model: Path, name: str, key: str, log: Path) -> None:
        if not (SGLANG / "installed").exists():
            pytest.skip("no .venv-sglang: make test-sglang makes it, and runs this test")
        command = [
            *(str(SGLANG / "bin" / "python"), "-m", "sglang.launch_server", "--device", "cpu"),
            *("--model-path", str(model), "--served-model-name", name, "--api-key", key),
            *("--attention-backend", "torch_native", "--dtype", "float32"),
            *("--max-total-tokens", "8192", "--max-running-requests", "16"),
            *("--context-length", "135", "--chunked-prefill-size", "32"),
            *("--sleep-on-idle", "--skip-server-warmup", "--log-level", "warning"),
        ]
        super().__init__(log, command, SGLANG_ENV)
