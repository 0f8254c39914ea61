"""The process of a Ray actor: its place, and the shell that runs its object.

    driver ── build("module:callable", args) ──► ActorShell ── call("method", args) ──► object

Only ``async_opd.cluster.remote`` calls an ActorShell.
"""

from __future__ import annotations

import asyncio
import gc
import importlib
import inspect
import os
import sys
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any

import ray

from async_opd.cluster.network import name_interface, own_address
from async_opd.config.sections.cluster import ClusterConfig
from async_opd.core.errors import first_cause
from async_opd.files.private_folder import private_compile_cache
from async_opd.files.safe_open import PRIVATE_UMASK
from async_opd.models import torchvision_operators, unasked
from async_opd.processes.listening import listening_socket
from async_opd.processes.loop_lag import LoopLag
from async_opd.processes.own_settings import give_back_large_blocks, yield_to_starting


@dataclass(frozen=True)
class ActorPlacement:
    """The node and the GPUs of a process, for other processes to share."""

    node: str
    gpus: tuple[str, ...]
    process: str = field(default="", compare=False)
    """Ray's id of the process; the next one has another."""

    def __str__(self) -> str:
        return f"GPU {', '.join(self.gpus) or '–'} of node {self.node}"


def own_place() -> ActorPlacement:
    """The node and the GPUs of this process."""
    context = ray.get_runtime_context()
    gpus = context.get_accelerator_ids().get("GPU", [])
    return ActorPlacement(context.get_node_id(), tuple(map(str, gpus)), context.get_worker_id())


ACTOR = "ASYNC_OPD_ACTOR"
"""The variable with the name of an actor, in its process and its children's."""


def imported(module: str) -> ModuleType:
    """Imports without garbage collection, which finds nothing and takes a quarter of the time.

    vLLM and its imports take 4.8 s of processor time instead of 6.4. Later collections leave out
    what the first import made, which lives as long as the process.
    """
    first = module not in sys.modules or not gc.get_freeze_count()
    gc.disable()
    try:
        found = importlib.import_module(module)
        if first:  # a freeze at each build would keep the garbage of the object before
            gc.freeze()
        return found
    finally:
        gc.enable()


class ActorShell:
    """The object in an actor's process. Ray runs it on uvloop; calls are concurrent."""

    def __init__(self) -> None:
        os.umask(PRIVATE_UMASK)  # a joined cluster may have another
        private_compile_cache()
        give_back_large_blocks()
        torchvision_operators.install()
        unasked.never_ask()
        name = os.environ.get(ACTOR, "")
        print(f"async_opd: this is the log of {name}", file=sys.stderr, flush=True)
        self._object: Any = None
        self._built = asyncio.Event()
        self._lag: LoopLag | None = None

    async def pid(self) -> int:
        """The actor's process id."""
        return os.getpid()

    async def is_built(self) -> bool:
        """Whether the object is built."""
        return self._built.is_set()

    async def lag(self) -> float:
        """Longest delay of its event loop since the last call, in seconds; 0 at the first call."""
        self._lag = self._lag or LoopLag()
        return self._lag.drain()

    async def reach(self, reached: Callable[[float], Awaitable[None]], timeout_s: float) -> None:
        """Awaits the ``Remote.reached`` of another process, from this one."""
        await reached(timeout_s)

    async def block_forever(self) -> None:
        """Never returns: its caller gets an error when the process ends."""
        await asyncio.Event().wait()

    async def place(self) -> ActorPlacement:
        """The node and the GPUs of the process."""
        return own_place()

    async def listen(self, cluster: ClusterConfig) -> tuple[str, int, int]:
        """Opens a socket for the object to build: its address, port and file descriptor."""
        address = own_address(cluster)
        listener = listening_socket(address, cluster.port_range)
        return address, int(listener.getsockname()[1]), listener.detach()

    async def build(self, factory: str, args: tuple[Any, ...]) -> None:
        """Builds the object: imports ``module:callable``, calls it, and awaits a coroutine."""
        name_interface(os.environ)
        module, _, name = factory.partition(":")
        made = getattr(imported(module), name)(*args)
        self._object = await made if inspect.isawaitable(made) else made
        await asyncio.to_thread(yield_to_starting)
        self._built.set()

    async def call(self, method: str, args: tuple[Any, ...], named: dict[str, Any]) -> Any:
        """Awaits a method of the object, after ``build`` in a process that was restarted."""
        await self._built.wait()
        try:
            return await getattr(self._object, method)(*args, **named)
        except ExceptionGroup as group:
            raise first_cause(group) from group
