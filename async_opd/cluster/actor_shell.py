"""The process of a Ray actor: its environment, its address, and the shell that runs its object.

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
from collections.abc import Awaitable, Callable, Mapping, MutableMapping
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any

import ray

from async_opd.config.secrets import without_secret_variables
from async_opd.config.sections.cluster import ClusterConfig
from async_opd.core.errors import first_cause
from async_opd.files.private_folder import private_compile_cache
from async_opd.files.safe_open import PRIVATE_UMASK
from async_opd.models import torchvision_operators, unasked
from async_opd.models.engine_args import LOOPBACK
from async_opd.processes.listening import interface_address, interface_of, listening_socket
from async_opd.processes.loop_lag import LoopLag
from async_opd.processes.own_settings import give_back_large_blocks, yield_to_starting

SHARED_PREFIXES = ("NCCL_", "TORCH_NCCL_", "GLOO_", "HF_")
SHARED_NAMES = {
    "VLLM_NCCL_SO_PATH",
    *(f"{scheme}_proxy" for scheme in ("http", "https", "all", "no")),
    *(f"{scheme}_PROXY" for scheme in ("HTTP", "HTTPS", "ALL", "NO")),
}
"""Variables of the driver that every process of a joined cluster gets, beside ``SHARED_PREFIXES``.

The trainer and the engines form one NCCL communicator, in which all have to have the same settings
(``NCCL_CUMEM_ENABLE``). vLLM 0.32 changes some of them for its own communicators only
(``vllm.utils.nccl.unpinned_nccl_env``).
"""


def own_address(cluster: ClusterConfig) -> str:
    """The address of this process's node, at which the others of the run reach it.

    It is Ray's: the host's name may resolve to 127.0.1.1. StageError if the node has no
    interface ``cluster.interface``.
    """
    if cluster.address is None:
        return "127.0.0.1"
    if cluster.interface is not None:
        return interface_address(cluster.interface)
    return str(ray.util.get_node_ip_address())


def shared_environment(cluster: ClusterConfig, environ: Mapping[str, str]) -> dict[str, str]:
    """The variables that all processes of a run get; ``environ`` is the driver's environment.

    Processes of a local run inherit ``environ``. In a joined cluster they inherit their node's, so
    they get the variables named above, except secrets: Ray shows a process's variables to all users
    of the cluster. Those of ``cluster.env`` come in their place.
    """
    if cluster.address is None:
        return {**cluster.env, **LOOPBACK}
    named = {name: value for name, value in environ.items() if _is_shared(name)}
    shared = {**without_secret_variables(named), **cluster.env}
    if cluster.interface is not None:
        shared |= _named(cluster.interface)
    return shared


def name_interface(environ: MutableMapping[str, str]) -> None:
    """Makes gloo and NCCL of this process use the interface that has its node's address in Ray.

    Otherwise gloo would listen where the host's name resolves to: on Debian on the loopback. Values
    that ``environ`` has already stay, as in a local run. StageError if no interface has the
    address.
    """
    unset = [name for name in LOOPBACK if not environ.get(name)]
    if unset:
        named = _named(interface_of(str(ray.util.get_node_ip_address())))
        environ.update((name, named[name]) for name in unset)


def _named(interface: str) -> dict[str, str]:
    return {
        "GLOO_SOCKET_IFNAME": interface,
        "NCCL_SOCKET_IFNAME": f"={interface}",  # without "=" it is a prefix
    }


def _is_shared(name: str) -> bool:
    return name in SHARED_NAMES or name.startswith(SHARED_PREFIXES)


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
