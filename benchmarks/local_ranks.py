"""Ranks of a trainer in processes of this machine, joined by pipes where a run has Ray.

this process ──fork──► rank 0: lead(seat, crew) ──pipe──► its result
               └─────► rank 1 … N-1: follow(seat) ◄──pipes── orders of rank 0's learner
"""

from __future__ import annotations

import asyncio
import multiprocessing
import os
import socket
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from multiprocessing.connection import Connection
from typing import Any

from async_opd.core.errors import StageError
from async_opd.core.seat import Seat
from trainer.crew import ALONE, Crew
from trainer.rank import Follower

Lead = Callable[[Seat | None, Crew], Any]
Follow = Callable[[Seat], Follower]


class Pipes:
    """A crew whose followers sit at the other ends of pipes."""

    def __init__(self, ends: Sequence[Connection]) -> None:
        self.ranks = len(ends) + 1
        self._ends = ends

    def order(self, method: str, arguments: Sequence[tuple[Any, ...]]) -> Callable[[], list[Any]]:
        """See trainer.crew.Crew."""
        for end, given in zip(self._ends, arguments, strict=True):
            end.send((method, given))
        return lambda: [end.recv() for end in self._ends]

    def give_up(self) -> None:
        """Whoever waits for them fails too."""

    async def failure(self) -> StageError:
        """A closed pipe ends the order that meets it."""
        raise NotImplementedError


def in_processes(ranks: int, lead: Lead, follow: Follow, timeout_s: float) -> Any:
    """What ``lead`` returns in the process of the first rank.

    EOFError or TimeoutError where it fails, hangs or takes longer.
    """
    context = multiprocessing.get_context("fork")  # hands sockets and functions down
    with socket.create_server(("127.0.0.1", 0)) as listener:
        seats = [
            Seat(
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
        pipes = [context.Pipe() for _ in seats[1:]]
        answer, question = context.Pipe(duplex=False)
        crew = Pipes([here for here, _ in pipes])
        works: list[Callable[[], Any]] = [lambda: _lead(seats[0], crew, lead, question)]
        works += [
            _following(s, follow, there) for s, (_, there) in zip(seats[1:], pipes, strict=True)
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


def _lead(seat: Seat, crew: Pipes, lead: Lead, answer: Connection) -> None:
    alone = crew.ranks == 1
    answer.send(lead(None if alone else seat, ALONE if alone else crew))
    os._exit(0)  # gloo's threads may abort an interpreter that is finalized


def _following(seat: Seat, follow: Follow, orders: Connection) -> Callable[[], None]:
    def work() -> None:
        follower = follow(seat)
        while True:
            method, given = orders.recv()
            orders.send(asyncio.run(getattr(follower, method)(*given)))

    return work
