"""Seats of an engine for held rows."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest

pytestmark = pytest.mark.slow


@pytest.mark.parametrize(
    ("given", "seats"),
    [
        ({"max_num_seqs": 64}, 70),
        ({"max_num_seqs": 1}, 1),
        ({"max_num_seqs": 64, "max_num_batched_tokens": 66}, 66),
        ({"max_num_seqs": 64, "max_num_batched_tokens": 8192}, 70),
    ],
)
def test_held_rows_have_seats_where_vllm_takes_them(given: dict[str, Any], seats: int) -> None:
    """vLLM refuses more seats than tokens of a step; one seat keeps a response's batch its own."""
    from rollouter.engine_io import with_seats

    assert with_seats(given)["max_num_seqs"] == seats


@pytest.mark.parametrize(("cuda", "rounding"), [(False, 2.0**-24), (True, 2.0**-11)])
def test_a_float32_engine_rounds_to_tf32_on_a_gpu(
    cuda: bool, rounding: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    import torch

    from rollouter import engine_io

    engine = SimpleNamespace(quant_config=None, model_config=SimpleNamespace(dtype=torch.float32))
    platform = SimpleNamespace(is_cuda=lambda: cuda)
    monkeypatch.setattr(engine_io, "current_platform", platform)
    assert engine_io.rounding_of(cast(Any, engine)) == rounding
