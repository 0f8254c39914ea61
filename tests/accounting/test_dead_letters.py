"""Dead letters: how many are too many, and how they travel."""

from __future__ import annotations

import pytest

from async_opd.accounting.dead_letters import DeadLetters
from async_opd.core.batch import Batch, unpack
from async_opd.core.errors import StageError
from async_opd.core.samples import NO_TEACHER, DeadLetter, Header


def header(uid: str, teacher: str = "t") -> Header:
    return Header(uid, 7, 100, 3, teacher)


def lost(count: int, teacher: str = "t") -> list[DeadLetter]:
    return [
        DeadLetter(header(f"p{index}/0", teacher), "too long — ünscorable")
        for index in range(count)
    ]


@pytest.mark.parametrize(
    ("share", "trained", "allowed", "cause"),
    [
        (0.002, 0, 2, r"3 rollouts .* allowed are 2 \(0.002 of 1000\).* too long"),
        (0.002, 1500, 3, r"4 rollouts .* allowed are 3"),
        (0.0, 0, 0, "allowed are 0"),
    ],
)
def test_a_share_is_taken_of_the_trained_rollouts_and_at_least_a_thousand(
    share: float, trained: int, allowed: int, cause: str
) -> None:
    letters = DeadLetters({"t": share, "u": 0.001})
    letters.trained([header(f"q{index}/0") for index in range(trained)])
    for one in (*lost(allowed), *lost(1, "u")):  # teachers are counted apart
        letters.add(one)
    with pytest.raises(StageError, match=f"(?s){cause}"):
        letters.add(lost(1)[0])


def test_rows_without_a_teacher_count_against_the_smallest_share_of_all_and_no_teachers() -> None:
    letters = DeadLetters({"t": 0.5, "u": 0.001})
    letters.trained([header(f"q{index}/0", "t") for index in range(1998)])
    for one in (*lost(2, NO_TEACHER), *lost(1, "u")):
        letters.add(one)
    cause = r"(?s)3 rollouts without a teacher .* allowed are 2\.001 .* raise teachers\.u\."
    with pytest.raises(StageError, match=cause):
        letters.add(lost(1, NO_TEACHER)[0])


def test_dead_letters_travel_with_readable_headers_and_their_reasons() -> None:
    letters = lost(2)
    batch = Batch.pack(letters)
    assert [(h.uid, h.tokens, h.teacher) for h in batch.headers] == [
        ("p0/0", 7, "t"),
        ("p1/0", 7, "t"),
    ]
    assert unpack(DeadLetter, [batch]) == letters
