"""A rollout that comes out of the engine in parts, and the pieces cut from it."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from async_opd.core.samples import Piece, Rollout, VersionSpan
from rollouter.growing import Growing
from tests.conftest import make_prompt

K = 2


def flat(positions: list[dict[int, tuple[float, int]] | list[tuple[int, float, int]]]) -> Any:
    """vLLM's flat log-probabilities: token, log-probability and rank of each entry."""
    made = SimpleNamespace(start_indices=[], end_indices=[], token_ids=[], logprobs=[], ranks=[])
    for position in positions:
        made.start_indices.append(len(made.token_ids))
        entries = (
            [(token, *rest) for token, rest in position.items()]
            if isinstance(position, dict)
            else position
        )
        for token, logprob, rank in entries:
            made.token_ids.append(token)
            made.logprobs.append(logprob)
            made.ranks.append(rank)
        made.end_indices.append(len(made.token_ids))
    return made


def entries(token: int, top_k: int = K) -> list[tuple[int, float, int]]:
    """The sampled token, then the best: tokens 0 and 1, at -0 and -1."""
    best = [(other, -float(other), other + 1) for other in range(top_k)]
    return [(token, -float(token), token + 1), *best]


def part(tokens: list[int], top_k: int = K, finish: str | None = None, fetched: bool = True) -> Any:
    """An output of these tokens; one that was not fetched in time went through dictionaries."""
    positions: list[Any] = [entries(token, top_k) for token in tokens]
    if not fetched:
        positions = [{t: (logprob, rank) for t, logprob, rank in p} for p in positions]
    spans = [SimpleNamespace(version="3", start=0, end=5)] if finish else None
    return SimpleNamespace(
        token_ids=tokens, logprobs=flat(positions), finish_reason=finish, weight_versions=spans
    )


def grown(*parts: Any, top_k: int = K) -> tuple[Growing, Rollout]:
    growing = Growing("p/0", make_prompt("p", "sort"), top_k)
    for output in parts:
        growing.add(output)
    return growing, growing.rollout(parts[-1])


def test_parts_make_the_same_rollout_as_the_whole() -> None:
    _, whole = grown(part([0, 5, 1, 2, 7], finish="stop"))
    _, found = grown(part([0]), part([5, 1]), part([2, 7], finish="stop"))
    for name in ("response_ids", "rollout_logprobs", "topk_ids"):
        np.testing.assert_array_equal(getattr(found, name), getattr(whole, name))
        assert getattr(found, name).dtype == getattr(whole, name).dtype
    assert found.version_spans == whole.version_spans == (VersionSpan(3, 0, 5),)


def test_the_best_tokens_survive_parts_that_were_not_fetched_in_time() -> None:
    _, found = grown(part([0, 5, 1], fetched=False), part([1, 0], finish="stop"))
    assert found.topk_ids is not None
    assert found.topk_ids.tolist() == [[0, 1]] * 5
    assert found.rollout_logprobs.tolist() == [0, -5, -1, -1, 0]


def test_without_a_top_k_there_is_none() -> None:
    growing, found = grown(part([4, 5], 0), part([6, 7, 8], 0, "length"), top_k=0)
    assert found.topk_ids is None
    assert growing.piece().topk_ids is None
    assert found.rollout_logprobs.tolist() == [-4, -5, -6, -7, -8]


def test_an_empty_response_is_a_rollout() -> None:
    empty = part([], finish="length")
    empty.weight_versions = None
    _, found = grown(empty)
    assert (len(found.response_ids), found.version_spans) == (0, ())


@given(st.lists(st.tuples(st.integers(1, 4), st.booleans()), min_size=1, max_size=6))
def test_pieces_concatenate_to_the_rollout(cuts: list[tuple[int, bool]]) -> None:
    growing, pieces, tokens = Growing("p/0", make_prompt(), K), [], 0
    for count, cut in cuts:
        growing.add(part(list(range(tokens, tokens + count))))
        tokens += count
        if cut:
            pieces.append(growing.piece())
            assert growing.unsent == 0
    pieces.append(growing.piece())
    assert joined(pieces).tolist() == list(range(tokens))
    assert [piece.start for piece in pieces] == np.cumsum(
        [0, *(len(piece.response_ids) for piece in pieces[:-1])]
    ).tolist()


def joined(pieces: list[Piece]) -> Any:
    return np.concatenate([piece.response_ids for piece in pieces])


def test_only_the_first_piece_has_the_prompt_and_it_is_the_teachers() -> None:
    prompt = replace(make_prompt(), teacher_ids=np.array([9, 9], np.int32))
    growing = Growing("p/0", prompt, K)
    growing.add(part([1]))
    first = growing.piece()
    growing.add(part([2]))
    assert (first.prompt_ids.tolist(), growing.piece().prompt_ids.tolist()) == ([9, 9], [])


@pytest.mark.parametrize("count", [0, 3])
def test_what_is_in_no_piece_yet_is_counted(count: int) -> None:
    growing = Growing("p/0", make_prompt(), K)
    growing.add(part(list(range(count))))
    assert growing.unsent == count
