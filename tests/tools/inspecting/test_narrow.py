"""Uids are on one line in a narrow terminal and in a pipe: they are arguments of the command."""

from __future__ import annotations

import io
from typing import Any

import pytest

from async_opd.tools.inspecting.view import View
from tests.microscope.samples import record

UID = "0:53/75#0/1"
RUN: Any = None
"""Tables of samples read nothing of a run."""


def rows() -> list[str]:
    out = io.StringIO()
    samples = [record(UID, 24, teacher="reverse", step=step) for step in (1, 153)]
    View(RUN, "loss", 20, out).samples("samples of a run", samples)
    return [line for line in out.getvalue().splitlines() if line.startswith("│")]


def test_a_uid_is_not_folded_on_80_columns(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    assert [UID in line for line in rows()].count(True) == 2


def test_a_pipe_has_a_line_for_each_sample(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("COLUMNS", "FORCE_COLOR", "TTY_COMPATIBLE"):
        monkeypatch.delenv(name, raising=False)
    assert [line.split()[1] for line in rows()] == [UID, UID]
