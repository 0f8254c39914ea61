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


def test_all_callbacks_are_called_at_the_end_and_the_first_of_their_errors_is_raised() -> None:
    callbacks = [Ends(), Ends(ValueError("first")), Ends(ValueError("second"))]
    sink = CallbackSink(callbacks)
    with pytest.raises(ValueError, match="first"):
        sink.close(SUMMARY)
    assert sink.error == "ValueError: first"
    assert [callback.ends for callback in callbacks] == [1, 1, 1]
    assert CallbackSink(callbacks[:1]).close(SUMMARY) is None


def test_an_error_of_the_last_checkpoint_is_raised_at_the_end() -> None:
    sink = CallbackSink([Ends()])
    sink.checkpoint(1, Path())
    with pytest.raises(KeyError, match="of a checkpoint"):
        sink.close(SUMMARY)
