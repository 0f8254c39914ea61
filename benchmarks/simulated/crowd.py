"""Simulated replicas that share a few processes; each call names its replica before its method.

StudentProxy ── call("student/7/run") ──► Crowd, in one of a few processes ──► replica 7

All that is outside of the engines' processes is that of a run with as many processes as replicas.
"""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Coroutine
from dataclasses import dataclass, field
from importlib import import_module
from typing import Any

from async_opd.cluster.actor_factory import ActorFactory
from async_opd.cluster.actor_names import ActorName
from async_opd.cluster.remote import Remote

PROCESSES = 4
"""Of the student's replicas, and of each teacher's."""


class Crowd:
    """The replicas of one process."""

    def __init__(self) -> None:
        self._replicas: dict[str, Any] = {}

    async def add(self, name: str, factory: str, args: tuple[Any, ...]) -> None:
        """Builds one more."""
        module, _, made = factory.partition(":")
        replica = getattr(import_module(module), made)(*args)
        self._replicas[name] = await replica if inspect.isawaitable(replica) else replica

    async def shutdown(self) -> None:
        """Nothing to end."""

    def __getattr__(self, call: str) -> Any:
        """The method of ``replica/method``."""
        name, _, method = call.rpartition("/")
        if not name:
            raise AttributeError(call)
        return getattr(self._replicas[name], method)


class Member(Remote):
    """One replica of a crowd."""

    @classmethod
    def of(cls, crowd: Remote, name: str) -> Member:
        """The replica ``name`` in the process of ``crowd``."""
        made = cls(name, crowd._handle, crowd._timeout_s)
        made.node, made.process, made.start_s = crowd.node, crowd.process, crowd.start_s
        return made

    def call(self, method: str, *args: Any, **named: Any) -> Coroutine[Any, Any, Any]:
        """See Remote.call."""
        return super().call(f"{self.name}/{method}", *args, **named)


@dataclass
class CrowdedFactory(ActorFactory):
    """Starts ``PROCESSES`` processes of a pool at most, and all of its replicas in these."""

    _crowds: dict[tuple[str, int], asyncio.Task[Remote]] = field(init=False, default_factory=dict)

    async def _start(
        self,
        actor: ActorName,
        factory: str,
        args: tuple[Any, ...],
        *,
        gpus: int,
        bundle: tuple[str, int],
        guest: str = "",
        trusted: bool = False,
    ) -> Remote:
        pool, index = bundle
        first = pool, index % PROCESSES
        if first not in self._crowds:
            started = super()._start(actor, f"{__name__}:Crowd", (), gpus=gpus, bundle=first)
            self._crowds[first] = asyncio.create_task(started)
        crowd = await asyncio.shield(self._crowds[first])
        await crowd.call("add", actor.name, factory, args)
        return Member.of(crowd, actor.name)
