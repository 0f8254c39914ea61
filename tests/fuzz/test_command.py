"""A slow case ends its own test, and no other; a bug of the command fails it."""

from __future__ import annotations

import signal

import pytest

from async_opd.tools import check
from tests.fuzz.command import TooLong, bounded, command


@pytest.mark.parametrize("number", [signal.SIGPROF, signal.SIGALRM])
def test_what_takes_too_long_is_shown_as_text_without_the_frame_that_the_signal_met(
    number: signal.Signals,
) -> None:
    def slow() -> None:
        signal.raise_signal(number)

    with (
        pytest.raises(TooLong, match=r"longer than 20 s, here:\n(.*\n)*.* in slow") as caught,
        bounded(),
    ):
        slow()
    assert "slow" not in [entry.name for entry in caught.traceback]


def test_a_wait_is_bounded_by_more_time_than_work() -> None:
    with bounded():
        work, wait = (signal.getitimer(one)[0] for one in (signal.ITIMER_PROF, signal.ITIMER_REAL))
    assert 0 < work < 21 < 190 < wait
    assert signal.getitimer(signal.ITIMER_REAL)[0] == 0


def test_a_bug_of_the_command_is_not_an_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    def load(*_: object) -> None:
        raise LookupError("nowhere")

    monkeypatch.setattr(check, "load_given", load)
    with pytest.raises(AssertionError, match="LookupError: nowhere"):
        command("check", "config.yaml")
