"""The mixture stays within one prompt of its weights, also where one source outweighs many."""

from __future__ import annotations

import pytest

from async_opd.core.prompts import PromptStream
from async_opd.core.sources import Row

WEIGHTS = (0.82, 0.06, 0.06, 0.06)


def test_no_source_is_ever_a_whole_prompt_ahead_of_its_share() -> None:
    sources = [[Row(f"{i}:0", str(i), "x", None, {})] for i in range(len(WEIGHTS))]
    stream = PromptStream(sources, WEIGHTS, lambda _: [1], lambda source: source, seed=0)
    taken = dict.fromkeys(map(str, range(len(WEIGHTS))), 0)
    for step in range(1, 300):
        taken[stream.next(1)[0].data_source] += 1
        for i, weight in enumerate(WEIGHTS):
            assert abs(taken[str(i)] - weight * step) < 1 + 1e-9


@pytest.mark.parametrize("graded", [True, False])
def test_a_row_goes_with_its_prompt_only_where_it_is_graded(graded: bool) -> None:
    row = Row("0:0", "a", "x", "answer", {})
    stream = PromptStream([[row]], [1.0], lambda _: [1], lambda s: s, seed=0, graded=graded)
    assert stream.next(1)[0].row == (row if graded else None)
