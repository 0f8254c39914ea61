"""Ranks of a trainer in processes of this machine, joined by pipes where a run has Ray.

this process ──fork──► rank 0: lead(spec, rank_group) ──pipe──► its result
               └─────► rank 1 … N-1: follow(spec) ◄──pipes── orders of rank 0's learner
"""

from __future__ import annotations

import asyncio
import multiprocessing
import os
import socket
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from multiprocessing.connection import Connection
from typing import Any

import torch

from async_opd.core.errors import StageError
from trainer.follower import Follower
from trainer.rank_group import SINGLE_RANK, RankGroup, RankSpec

Lead = Callable[[RankSpec | None, RankGroup], Any]
Follow = Callable[[RankSpec], Follower]


class Pipes:
    """A rank group whose followers are at the other ends of pipes."""

    def __init__(self, ends: Sequence[Connection]) -> None:
        self.ranks = len(ends) + 1
        self._ends = ends

    def dispatch(
        self, method: str, arguments: Sequence[tuple[Any, ...]]
    ) -> Callable[[], list[Any]]:
        """See trainer.rank_group.RankGroup."""
        for end, given in zip(self._ends, arguments, strict=True):
            end.send((method, given))
        return lambda: [end.recv() for end in self._ends]

    def mark_broken(self) -> None:
        """Calls that wait for them fail too."""

    async def failure(self) -> StageError:
        """A closed pipe ends the order that meets it."""
        raise NotImplementedError


def in_processes(ranks: int, lead: Lead, follow: Follow, timeout_s: float) -> Any:
    """The result of ``lead`` in the process of the first rank. Each has one CPU thread at first:

    the threads of a pool that this process has used are not there after a fork, and are waited for.
    EOFError or TimeoutError where it fails, hangs or takes longer.
    """
    context = multiprocessing.get_context("fork")  # hands sockets and functions down
    with socket.create_server(("127.0.0.1", 0)) as listener:
        specs = [
            RankSpec(
                rank,
                ranks,
                *listener.getsockname(),
                timeout_s,
                timeout_s,
                b"secret",
                listener.fileno(),
            )
            for rank in range(ranks)
        ]
        pipes = [context.Pipe() for _ in specs[1:]]
        answer, question = context.Pipe(duplex=False)
        rank_group = Pipes([here for here, _ in pipes])
        works: list[Callable[[], Any]] = [lambda: _lead(specs[0], rank_group, lead, question)]
        works += [
            _following(s, follow, there) for s, (_, there) in zip(specs[1:], pipes, strict=True)
        ]
        with _started([context.Process(target=work) for work in works]):
            question.close()
            if not answer.poll(timeout_s):
                raise TimeoutError(f"{ranks} ranks took longer than {timeout_s:g} s")
            return answer.recv()


@contextmanager
def _started(processes: Sequence[Any]) -> Iterator[None]:
    for process in processes:
        process.start()
    try:
        yield
    finally:
        for process in processes:
            process.kill()
            process.join()


def _forget_pools() -> None:
    """No thread of a pool that the parent has used is here after the fork: it is waited for."""
    torch.set_num_threads(1)
    inductor = sys.modules.get("torch._inductor.async_compile")
    if inductor is not None:  # which forgets its processes itself, and not its threads
        inductor.AsyncCompile.pool.cache_clear()


def _lead(spec: RankSpec, rank_group: Pipes, lead: Lead, answer: Connection) -> None:
    alone = rank_group.ranks == 1
    _forget_pools()
    answer.send(lead(None if alone else spec, SINGLE_RANK if alone else rank_group))
    os._exit(0)  # gloo's threads may abort an interpreter that is finalized


def _following(spec: RankSpec, follow: Follow, orders: Connection) -> Callable[[], None]:
    def work() -> None:
        _forget_pools()
        follower = follow(spec)
        while True:
            method, given = orders.recv()
            orders.send(asyncio.run(getattr(follower, method)(*given)))

    return work
