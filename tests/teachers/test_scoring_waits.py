"""Whether scoring waits for its device: on a pretended one, which counts."""

from __future__ import annotations

from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from unittest import mock

import numpy as np
import pytest
import torch

from teachers.rows import Chunk, RowRequest, RowScores
from tests.world.pretended_device import Waits, device

VOCABULARY, ROWS = 11, 3


def of_step(top_k: int, columns: int, pinned: bool) -> list[str]:
    """The waits of two engine steps of two requests."""
    wanted = np.ones((ROWS, columns), np.int32)
    with (waits := Waits()):
        head = torch.randn(4, VOCABULARY).to(device())
        hidden = torch.randn(2 * ROWS, 4).to(device())
        scores = RowScores(lambda states: states @ head, VOCABULARY)
        for name in "ab":
            scores.add(name, RowRequest(((0, ROWS),), wanted.tobytes(), columns, top_k))
        waits.found.clear()
        pin = (lambda ids: waits.pin(ids)) if pinned else (lambda ids: ids.clone())
        with mock.patch("torch.Tensor.pin_memory", pin):
            assert scores.step(hidden, [Chunk("a", 0, 2, 0), Chunk("b", 0, 2, 2)]) == {}
            found = scores.step(hidden, [Chunk("a", 2, ROWS, 0), Chunk("b", 2, ROWS, 1)])
    assert sorted(found) == ["a", "b"]
    return waits.found


@pytest.mark.slow  # torch is imported once more: it keeps a device that it has been given
@pytest.mark.parametrize(("top_k", "columns"), [(0, 1), (2, 1), (0, 3)])
def test_an_engine_step_waits_for_no_device(top_k: int, columns: int) -> None:
    with ProcessPoolExecutor(1, get_context("spawn")) as apart:
        assert apart.submit(of_step, top_k, columns, True).result(300) == []
        not_pinned = apart.submit(of_step, top_k, columns, False).result(300)
    assert len(not_pinned) == 2, "the copy of each request's ids"
