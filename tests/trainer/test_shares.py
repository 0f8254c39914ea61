"""Shares of a packed row: together they are the row, whatever its sequences and the ranks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from async_opd.core.samples import Sample
from async_opd.core.scores import HiddenStates
from tests.trainer.models import random_sample
from trainer.batches.packing import Packed, Row, pack
from trainer.context import padding, share_of
from trainer.losses.chunked import response_sums

ROWS = st.lists(st.tuples(st.integers(1, 4), st.integers(0, 9)), min_size=1, max_size=6)
"""Prompts and responses: one over several ranks, many short ones, fewer tokens than ranks."""
RANKS = st.integers(1, 9)


def with_states(sample: Sample, teacher: str) -> Sample:
    prompt = sample.rollout.prompt
    size = len(sample.rollout.response_ids)
    states = np.random.default_rng(size).standard_normal((size, 3)).astype(np.float32)
    rollout = replace(sample.rollout, prompt=replace(prompt, teacher=teacher))
    return Sample(rollout, HiddenStates(states, "float32"))


def packed(sizes: Sequence[tuple[int, int]], k: int = 2) -> Packed:
    return pack([random_sample(i, size, k, prompt) for i, (prompt, size) in enumerate(sizes)])


def shares(row: Packed, ranks: int) -> list[Packed]:
    return [share_of(row, rank, ranks) for rank in range(ranks)]


@given(ROWS, RANKS)
def test_shares_are_equal_and_together_the_row(sizes: list[tuple[int, int]], ranks: int) -> None:
    row = packed(sizes)
    parts = shares(row, ranks)
    tokens = row.input_ids.numel()
    assert {part.input_ids.shape for part in parts} == {
        (1, (tokens + padding(tokens, ranks)) // ranks)
    }
    ids = torch.cat([part.input_ids for part in parts], 1)[0]
    positions = torch.cat([part.position_ids for part in parts], 1)[0]
    assert torch.equal(ids[:tokens], row.input_ids[0])
    assert torch.equal(positions[:tokens], row.position_ids[0])
    assert torch.equal(positions[tokens:], torch.arange(padding(tokens, ranks)))


@given(ROWS, RANKS)
def test_every_share_knows_where_sequences_begin(sizes: list[tuple[int, int]], ranks: int) -> None:
    row = packed(sizes)
    tokens = row.input_ids.numel()
    added = [tokens + padding(tokens, ranks)] if padding(tokens, ranks) else []
    for part in shares(row, ranks):
        assert part.starts.tolist() == row.starts.tolist() + added
        assert part.longest == int(part.starts.diff().max())


@given(ROWS, RANKS)
def test_a_token_is_on_the_rank_that_predicts_it(sizes: list[tuple[int, int]], ranks: int) -> None:
    row = packed(sizes)
    parts = shares(row, ranks)
    size = parts[0].input_ids.numel()
    rows = torch.cat([part.rows + rank * size for rank, part in enumerate(parts)])
    assert torch.equal(rows, row.rows)
    for name in ("targets", "weights", "teacher_ids", "teacher_logprobs", "rollout_logprobs"):
        joined = torch.cat([getattr(part.tokens, name) for part in parts])
        assert torch.equal(joined, getattr(row.tokens, name)), name


@given(ROWS, RANKS)
def test_states_go_to_tokens_that_they_predict(sizes: list[tuple[int, int]], ranks: int) -> None:
    samples = [random_sample(i, size, 0, prompt) for i, (prompt, size) in enumerate(sizes)]
    row = pack([with_states(s, "ab"[2 * i // len(samples)]) for i, s in enumerate(samples)])
    found = []
    for part in shares(row, ranks):
        assert sum(len(one.states) for one in part.tokens.teacher_states) == len(part.tokens)
        starts = [one.start for one in part.tokens.teacher_states]
        assert starts == [0, *(one.rows.stop for one in part.tokens.teacher_states)][: len(starts)]
        found += [
            (one.teacher, state) for one in part.tokens.teacher_states for state in one.states
        ]
    expected = [(one.teacher, state) for one in row.tokens.teacher_states for state in one.states]
    assert [name for name, _ in found] == [name for name, _ in expected]
    assert all(torch.equal(a, b) for (_, a), (_, b) in zip(found, expected, strict=True))


@given(ROWS, RANKS)
def test_experts_go_with_their_tokens(sizes: list[tuple[int, int]], ranks: int) -> None:
    row = packed(sizes)
    tokens = row.input_ids.numel()
    row = replace(row, experts=torch.arange(6 * tokens).view(tokens, 2, 3))
    found = [part.experts for part in shares(row, ranks) if part.experts is not None]
    joined = torch.cat(found)
    assert torch.equal(joined[:tokens], row.experts)
    assert bool((joined[tokens:] == -1).all())
    assert {len(part) for part in found} == {shares(row, ranks)[0].input_ids.numel()}


@given(ROWS, RANKS)
def test_sums_of_responses_are_those_of_the_row(sizes: list[tuple[int, int]], ranks: int) -> None:
    row = packed(sizes)
    values = torch.linspace(1, 2, len(row.tokens), dtype=torch.double)
    expected = response_sums(values, row.tokens.response_starts)
    parts = [part.tokens for part in shares(row, ranks)]
    given_values = values.split([len(part) for part in parts])
    given_sums: list[torch.Tensor] = []  # of every rank before they are summed
    for part, own in zip(parts, given_values, strict=True):
        response_sums(own, part.response_starts, part.of, given_sums.append)
    total = torch.stack(given_sums).sum(0)
    found = [
        response_sums(own, part.response_starts, part.of, lambda sums: sums.copy_(total))
        for part, own in zip(parts, given_values, strict=True)
        if part.response_starts is not None
    ]
    assert torch.allclose(torch.cat(found), expected)


def test_a_row_without_responses_is_cut_too() -> None:
    ids = [np.arange(5), np.arange(4)]
    row = Row.of(ids, ids)
    parts = [share_of(row, rank, 4) for rank in range(4)]
    assert [part.input_ids.tolist() for part in parts] == [
        [[0, 1, 2]],
        [[3, 4, 0]],
        [[1, 2, 3]],
        [[0, 0, 0]],
    ]
    assert parts[0].starts.tolist() == [0, 5, 9, 12]
