"""The one Ray actor shell: it builds a plain object in its own process and calls its methods.

    driver ── build("module:callable", args) ──► Host ── call("method", args) ──► object

Typed proxies in ``async_opd.cluster.proxies`` stand on top; nothing else talks to a Host.
"""

from __future__ import annotations

import asyncio
import importlib
import os
from typing import Any

import ray

from async_opd.core.errors import EngineStartError, StageError, StageTimeout, first_cause


class Host:
    """Lives in an actor process. Ray runs it on uvloop; calls are concurrent."""

    def __init__(self) -> None:
        self._object: Any = None

    async def pid(self) -> int:
        """The actor's process id."""
        return os.getpid()

    async def build(self, factory: str, args: tuple[Any, ...]) -> None:
        """Imports ``module:callable`` and calls it."""
        module, _, name = factory.partition(":")
        self._object = getattr(importlib.import_module(module), name)(*args)

    async def call(self, method: str, args: tuple[Any, ...]) -> Any:
        """Awaits a method of the object."""
        try:
            return await getattr(self._object, method)(*args)
        except ExceptionGroup as group:
            raise first_cause(group) from group


class Remote:
    """A named Host. Picklable: other actors may hold it too.

    Every call maps Ray's errors to ours: a dead process, an error inside, a wait without end.
    """

    def __init__(self, name: str, handle: Any, timeout_s: float) -> None:
        self.name = name
        self._handle = handle
        self._timeout_s = timeout_s

    @classmethod
    def create(
        cls,
        name: str,
        *,
        timeout_s: float,
        env: dict[str, str] | None = None,
        gpus: int = 0,
    ) -> Remote:
        """Starts the process. It reserves no CPU: actors that mostly wait would block others.

        With an environment of its own it also knows its name, and so do its children:
        ``ASYNC_OPD_BOX``.
        """
        options: dict[str, Any] = {"num_cpus": 0, "max_concurrency": 10_000}
        if env:
            options["runtime_env"] = {"env_vars": {**env, "ASYNC_OPD_BOX": name}}
        if gpus:
            options["num_gpus"] = gpus
        return cls(name, ray.remote(Host).options(**options).remote(), timeout_s)

    async def build(self, factory: str, args: tuple[Any, ...], timeout_s: float) -> None:
        """Builds the object; EngineStartError with the process's last words if that fails."""
        try:
            pid = await self._bounded(self._handle.pid.remote(), timeout_s, "starting a process")
            await self._bounded(self._handle.build.remote(factory, args), timeout_s, "building")
        except StageError as error:
            words = last_words(pid) if "pid" in locals() else ""
            raise EngineStartError(
                self.name,
                f"did not start: {error.cause}"
                + (f"\n    its last words:\n{words}" if words else ""),
                error.remedy,
            ) from error

    async def call(self, method: str, *args: Any, timeout_s: float | None = None) -> Any:
        """Calls a method with the default or another bound; ``float('inf')`` for none."""
        bound = self._timeout_s if timeout_s is None else timeout_s
        return await self._bounded(self._handle.call.remote(method, args), bound, method)

    async def _bounded(self, reference: Any, timeout_s: float, what: str) -> Any:
        try:
            async with asyncio.timeout(None if timeout_s == float("inf") else timeout_s):
                return await reference
        except TimeoutError as error:
            raise StageTimeout(
                self.name,
                f"{what} took longer than {timeout_s:g} s",
                "see timeouts.* in the config",
            ) from error
        except ray.exceptions.RayActorError as error:
            raise StageError(
                self.name,
                f"its process died during {what}: {' '.join(str(error).split())[:500]}",
                "see its log in Ray's session directory; running out of memory is the most "
                "common cause of a sudden death",
            ) from error
        except ray.exceptions.RayTaskError as error:
            cause = first_cause(error.cause)
            if isinstance(cause, StageError):
                raise cause from error
            raise StageError(
                self.name, f"{what} failed: {type(cause).__name__}: {cause}"
            ) from error

    def kill(self) -> None:
        """Ends the process and its children."""
        ray.kill(self._handle)


def last_words(pid: int, lines: int = 15) -> str:
    """The end of an actor's standard error, if its log is on this machine."""
    node = ray._private.worker._global_node
    if node is None:
        return ""
    words: list[str] = []
    for suffix in ("err", "out"):
        for path in sorted(os.scandir(node.get_logs_dir_path()), key=lambda entry: entry.name):
            if path.name.startswith("worker-") and path.name.endswith(f"-{pid}.{suffix}"):
                with open(path.path, errors="replace") as file:
                    words += [line.rstrip() for line in file if "rror" in line][-lines:]
    return "\n".join(f"      {word}" for word in words)
