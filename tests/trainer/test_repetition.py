"""How repetition is counted."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from tests.conftest import make_rollout
from trainer.batches.batch_metrics import repetition


def of(ids: list[int]) -> float:
    rollout = replace(make_rollout(tokens=len(ids)), continuation=np.array(ids, dtype=np.int32))
    return repetition(rollout)


def test_a_response_without_repetition_has_none() -> None:
    assert of(list(range(50))) == 0


def test_a_loop_is_nearly_all_repetition() -> None:
    assert of([1, 2, 3] * 100) == pytest.approx(1 - 3 / 293)


def test_a_short_response_has_none() -> None:
    assert of([7] * 8) == 0
