"""The effects of errors of callbacks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from async_opd.api import Callback, CallbackSink

SUMMARY: Any = object()


class Ends(Callback):
    """Counts its ends, and fails if it has an error."""

    def __init__(self, error: Exception | None = None) -> None:
        self.error, self.ends = error, 0

    def on_end(self, summary: Any) -> None:
        self.ends += 1
        if self.error is not None:
            raise self.error

    def on_checkpoint(self, step: int, folder: Path) -> None:
        raise KeyError("of a checkpoint")


def test_all_callbacks_are_called_at_the_end_though_an_earlier_one_fails() -> None:
    failing, other = Ends(ValueError("first")), Ends()
    with pytest.raises(ValueError, match="first"):
        CallbackSink([failing, other]).close(SUMMARY)
    assert (failing.ends, other.ends) == (1, 1)


def test_the_first_of_several_errors_is_raised_and_kept() -> None:
    sink = CallbackSink([Ends(ValueError("first")), Ends(ValueError("second"))])
    with pytest.raises(ValueError, match="first"):
        sink.close(SUMMARY)
    assert sink.error == "ValueError: first"


def test_an_error_of_the_last_checkpoint_is_raised_at_the_end() -> None:
    sink = CallbackSink([Ends()])
    sink.checkpoint(1, Path())
    with pytest.raises(KeyError, match="of a checkpoint"):
        sink.close(SUMMARY)


def test_an_end_without_an_error_leaves_none() -> None:
    sink = CallbackSink([Ends()])
    assert (sink.close(SUMMARY), sink.error) == (None, None)
