"""Rows of rollouts that are not finished, and where they are."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from async_opd.core.samples import Int32, Piece
from teachers.homes import Homes
from teachers.kept import STALE_S, Kept, Rows

PROMPT = np.array([1, 2, 3], np.int32)


def ids(*tokens: int) -> Int32:
    return np.array(tokens, np.int32)[:, None]


def rows(*values: float) -> Rows:
    return np.array(values, np.float32)[:, None]


@dataclass
class Clock:
    now: float = 0.0

    def __call__(self) -> float:
        return self.now


def give(kept: Kept, uid: str, start: int, tokens: Int32) -> bool:
    """A piece, whose rows are its tokens. Whether it was of use."""
    begun = kept.begun(uid, start, PROMPT if start == 0 else PROMPT[:0], tokens)
    if begun is not None:
        kept.keep(uid, begun, tokens.astype(np.float32))
    return begun is not None


def test_rows_of_all_pieces_come_out_together_and_once() -> None:
    kept = Kept()
    assert give(kept, "p/0", 0, ids(4, 5))
    assert give(kept, "p/0", 2, ids(6))
    found = kept.take("p/0", PROMPT, ids(4, 5, 6, 7))
    assert found is not None
    assert found.tolist() == rows(4, 5, 6).tolist()
    assert kept.take("p/0", PROMPT, ids(4, 5, 6, 7)) is None


def test_a_piece_after_one_that_is_missing_is_of_no_use() -> None:
    kept = Kept()
    assert not give(kept, "p/0", 2, ids(6))
    give(kept, "q/0", 0, ids(4))
    assert not give(kept, "q/0", 2, ids(6))


def test_a_piece_that_comes_twice_changes_nothing() -> None:
    kept = Kept()
    give(kept, "p/0", 0, ids(4, 5))
    give(kept, "p/0", 2, ids(6))
    assert not give(kept, "p/0", 2, ids(6))
    found = kept.take("p/0", PROMPT, ids(4, 5, 6))
    assert found is not None
    assert len(found) == 3


def test_rows_are_given_up_to_the_first_token_that_differs() -> None:
    kept = Kept()
    give(kept, "p/0", 0, ids(4, 5, 6))
    found = kept.take("p/0", PROMPT, ids(4, 9, 6))
    assert found is not None
    assert found.tolist() == [[4]]


def test_rows_after_another_prompt_are_never_given() -> None:
    kept = Kept()
    give(kept, "p/0", 0, ids(4))
    assert kept.take("p/0", PROMPT + 1, ids(4)) is None


def test_rows_of_other_candidates_are_never_given() -> None:
    kept, asked = Kept(), np.array([[4, 7], [5, 8]], np.int32)
    give(kept, "p/0", 0, asked)
    asked = np.array([[4, 9], [5, 8]], np.int32)
    assert kept.take("p/0", PROMPT, asked) is None


def test_a_first_piece_begins_anew() -> None:
    kept = Kept()
    give(kept, "p/0", 0, ids(4, 5))
    give(kept, "p/0", 0, ids(7))
    found = kept.take("p/0", PROMPT, ids(7, 8))
    assert found is not None
    assert found.tolist() == [[7]]


def test_what_is_closed_gets_no_more_but_is_given() -> None:
    kept = Kept()
    begun = kept.begun("p/0", 0, PROMPT, ids(4))
    assert begun is not None
    kept.keep("p/0", begun, rows(4), closed=True)
    assert not give(kept, "p/0", 1, ids(5))
    assert kept.take("p/0", PROMPT, ids(4, 5)) is not None


def test_without_room_nothing_new_is_kept_and_the_old_stays() -> None:
    kept = Kept(most_bytes=30)  # a prompt is 12, a token and its row are 8
    give(kept, "p/0", 0, ids(4))
    give(kept, "q/0", 0, ids(4))
    assert give(kept, "p/0", 1, ids(5))
    assert kept.take("q/0", PROMPT, ids(4)) is None
    assert kept.take("p/0", PROMPT, ids(4, 5)) is not None


def test_what_grows_beyond_the_room_is_forgotten_whole() -> None:
    kept = Kept(most_bytes=30)
    give(kept, "p/0", 0, ids(4))
    give(kept, "p/0", 1, ids(5, 6, 7))
    assert not give(kept, "p/0", 4, ids(8))
    assert give(kept, "q/0", 0, ids(4))
    assert kept.take("q/0", PROMPT, ids(4)) is not None


def test_what_was_not_heard_of_for_long_makes_room() -> None:
    clock = Clock()
    kept = Kept(most_bytes=30, clock=clock)
    give(kept, "p/0", 0, ids(4))
    clock.now = STALE_S
    give(kept, "q/0", 0, ids(4))
    assert kept.take("q/0", PROMPT, ids(4)) is not None


def test_rows_ahead_and_rows_of_use_are_counted() -> None:
    kept = Kept()
    assert kept.drain() == {}
    give(kept, "p/0", 0, ids(4, 5, 6))
    kept.take("p/0", PROMPT, ids(4, 5, 9))
    assert kept.drain() == {"early_rows": 3, "early_used": 2}
    assert kept.drain() == {}


def piece(uid: str, start: int = 0) -> Piece:
    return Piece(uid, "t", start, PROMPT, np.zeros(1, np.int32))


def test_beginnings_go_where_the_fewest_are() -> None:
    homes: Homes[str] = Homes()
    assert [homes.place(piece(f"p/{i}"), ["a", "b"]) for i in range(4)] == ["a", "b", "a", "b"]


def test_further_pieces_go_where_the_first_is() -> None:
    homes: Homes[str] = Homes()
    homes.place(piece("p/0"), ["a"])
    assert homes.place(piece("p/0", 1), ["b", "a"]) == "a"


def test_pieces_of_what_is_nowhere_have_no_place() -> None:
    homes: Homes[str] = Homes()
    assert homes.place(piece("p/0", 1), ["a"]) is None
    homes.place(piece("q/0"), ["a"])
    assert homes.place(piece("q/0", 1), ["b"]) is None  # a has left
    assert homes.place(piece("r/0"), []) is None


def test_a_rollout_leaves_its_home_once() -> None:
    homes: Homes[str] = Homes()
    homes.place(piece("p/0"), ["a"])
    assert (homes.finish("p/0"), homes.finish("p/0")) == ("a", None)


def test_no_home_is_forgotten_among_as_many_rollouts_as_it_says() -> None:
    homes: Homes[str] = Homes(remembered=3)
    for name in "pqrs":
        homes.place(piece(f"{name}/0"), ["a"])
    assert [homes.place(piece(f"{name}/0", 1), ["a"]) for name in "srqp"] == ["a", "a", "a", None]


def test_as_many_finished_rollouts_are_remembered_as_it_says() -> None:
    homes: Homes[str] = Homes(remembered=3)
    for name in "pqrs":
        homes.finish(f"{name}/0")
    assert [homes.place(piece(f"{name}/0"), ["a"]) for name in "srqp"] == [None, None, None, "a"]


def test_pieces_that_come_after_their_rollout_have_no_place() -> None:
    homes: Homes[str] = Homes()
    homes.place(piece("p/0"), ["a", "b"])
    homes.finish("p/0")
    assert [homes.place(piece("p/0", start), ["a", "b"]) for start in (0, 1)] == [None, None]
    assert homes.place(piece("q/0"), ["a", "b"]) == "a"
