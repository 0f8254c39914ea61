"""The guardrail's rollbacks of a run, in a file that no rewind cuts."""

from __future__ import annotations

from pathlib import Path

import pytest

from async_opd.accounting.lineage import ROLL_BACKS, RollBack, add_roll_back, read_roll_backs
from async_opd.core.errors import CheckpointError


def test_rollbacks_are_read_in_their_order(tmp_path: Path) -> None:
    assert read_roll_backs(tmp_path) == []
    first, second = RollBack(30, "too long"), RollBack(20, "cut off")
    assert [add_roll_back(tmp_path, first), add_roll_back(tmp_path, second)] == [1, 2]
    assert read_roll_backs(tmp_path) == [first, second]


@pytest.mark.parametrize("content", ["no json", "{}", '[{"step": "last", "reason": ""}]'])
def test_a_file_that_was_changed_is_refused_with_a_remedy(tmp_path: Path, content: str) -> None:
    (tmp_path / ROLL_BACKS).write_text(content)
    with pytest.raises(CheckpointError, match="restore it"):
        read_roll_backs(tmp_path)
