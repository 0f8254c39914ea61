"""A coroutine from ordinary code, also where an event loop runs already, as in a notebook."""

from __future__ import annotations

import _thread
import asyncio
import signal
import threading
from collections.abc import Callable
from typing import Any

import pytest
import uvloop

from async_opd.waiting import own_loop
from async_opd.waiting.own_loop import run_to_end


def in_a_cell(call: Callable[[], Any]) -> Any:
    """The result of a call in the main thread under a running loop, as in a cell of a notebook."""

    async def cell() -> Any:
        signal.signal(signal.SIGINT, signal.default_int_handler)
        return call()

    return asyncio.run(cell())


async def here() -> tuple[bool, str]:
    """Whether this is the main thread, and the module of the event loop."""
    return (
        threading.current_thread() is threading.main_thread(),
        type(asyncio.get_running_loop()).__module__.partition(".")[0],
    )


async def fail() -> None:
    raise ValueError("bad")


@pytest.mark.parametrize("notebook", [False, True])
def test_the_result_is_that_of_the_loop_that_was_asked_for(notebook: bool) -> None:
    def call() -> Any:
        return run_to_end(here()), run_to_end(here(), uvloop.new_event_loop)

    main = not notebook
    assert (in_a_cell(call) if notebook else call()) == ((main, "asyncio"), (main, "uvloop"))


@pytest.mark.parametrize("notebook", [False, True])
def test_an_error_is_raised_as_it_is(notebook: bool) -> None:
    with pytest.raises(ValueError, match="bad"):
        in_a_cell(lambda: run_to_end(fail())) if notebook else run_to_end(fail())


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(own_loop, "LOOK_S", 0.01)


async def interrupted(times: int) -> str:
    """Interrupts the cell, and ends with a result when it is cancelled."""
    _thread.interrupt_main()
    try:
        await asyncio.Event().wait()
    except asyncio.CancelledError:
        for _ in range(times - 1):
            _thread.interrupt_main()
    return "saved"


@pytest.mark.parametrize("times", [1, 3])
def test_interrupts_of_a_cell_cancel_the_work_once_and_its_result_is_returned(
    times: int, quick: None
) -> None:
    assert in_a_cell(lambda: run_to_end(interrupted(times))) == "saved"


async def cancelled() -> None:
    _thread.interrupt_main()
    await asyncio.Event().wait()


def test_an_interrupt_of_work_without_a_result_is_raised(quick: None) -> None:
    with pytest.raises(KeyboardInterrupt):
        in_a_cell(lambda: run_to_end(cancelled()))
