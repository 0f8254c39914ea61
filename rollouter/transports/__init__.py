"""How weights travel from the trainer to the engines: one module per transport, with both ends.

    trainer: sender ──chunks──► receivers: one in each worker of each engine

``async_opd.config.registry.TRANSPORTS`` names the modules; ``Transport`` is what each has. The
trainer and the driver import them too, so they import vllm, and torch, inside of functions only.
"""

from __future__ import annotations

import importlib
from collections.abc import Collection
from typing import TYPE_CHECKING, Protocol, cast

from async_opd.core.errors import StageError

if TYPE_CHECKING:
    from async_opd.models.engine_args import Device
    from async_opd.weight_sync.layout import Rendezvous
    from rollouter.transports.chunks import Receiver, Sender

AUTO = {"cpu": "gloo", "cuda": "nccl"}
"""The transport of ``sync.backend: auto``, by the device of the pools. On GPUs that trainer and
engines share, ``RunConfig.sync_backend`` names another."""


class Transport(Protocol):
    """A module of this folder."""

    __name__: str
    DEVICES: Collection[str]
    """Where it works: ``cpu``, ``cuda``."""

    def sender(self, host: str, timeout_s: float, chunk_bytes: int) -> Sender:
        """The trainer's end of one group. ``host``: the trainer's address."""
        ...

    def receiver(self, at: Rendezvous, rank: int) -> Receiver:
        """A worker's end: joins the group as ``rank``."""
        ...


def transport(name: str) -> Transport:
    """The module of a transport. UserCodeError for a user's one that cannot be loaded."""
    from async_opd.config.registry import TRANSPORTS  # needs pydantic, a transport does not
    from async_opd.config.user_code import user_transport

    if name not in TRANSPORTS:
        return cast("Transport", user_transport(name))
    return cast("Transport", importlib.import_module(TRANSPORTS[name]))


def chosen(backend: str, device: Device) -> str:
    """The transport of that name, or of ``auto``. StageError if it does not work on the device."""
    name = AUTO[device] if backend == "auto" else backend
    if device not in transport(name).DEVICES:
        cause = f"sync.backend is {name} but the pools are on {device.upper()}"
        raise StageError("weight sync", cause, "use auto")
    return name
