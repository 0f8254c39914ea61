"""Long work on large arrays in a worker thread, so that the event loop goes on."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")

LARGE = 1 << 20
"""Bytes that are read or copied in about a millisecond: as long as a thread takes to begin."""


async def offload(nbytes: int, work: Callable[P, T], *args: P.args, **named: P.kwargs) -> T:
    """The result of work on so many bytes: in a thread if they are many, else at once."""
    if nbytes < LARGE:
        return work(*args, **named)
    return await asyncio.to_thread(work, *args, **named)
