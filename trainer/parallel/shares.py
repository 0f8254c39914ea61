"""Cuts a packed row into equal shares of consecutive tokens, one for each context rank.

    row        │ a a a a a b b │ b c c d d d · │     T = 13 tokens of 4 sequences, one of padding
    share          rank 0          rank 1            7 tokens each

A sequence may lie in several shares. Each rank knows where all sequences of the row begin, since
attention sees them whole; response tokens belong to the rank with the row of logits that predicts
them.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TypeVar

import torch

from trainer.batches.packing import Packed, Row
from trainer.losses.base import TeacherStates, Tokens

AnyRow = TypeVar("AnyRow", bound=Row)


def padding(tokens: int, ranks: int) -> int:
    """Tokens that are added to a row, so that its shares are equal."""
    return -tokens % ranks


def share_of(row: AnyRow, rank: int, ranks: int) -> AnyRow:
    """The share of one of the ranks, on the row's device.

    Its input and position ids are those of its tokens. ``starts`` and ``longest`` stay those of the
    whole row; what is added to it is one more sequence. ``rows`` count from the share's start.
    """
    total = row.input_ids.shape[1]
    added = padding(total, ranks)
    size = (total + added) // ranks
    start, end = rank * size, (rank + 1) * size
    if added:
        ids, at = row.input_ids, torch.arange(added, device=row.input_ids.device)
        row = replace(
            row,
            input_ids=torch.cat([ids, ids.new_zeros(1, added)], 1),
            position_ids=torch.cat([row.position_ids, at[None]], 1),
            starts=torch.cat([row.starts, row.starts.new_tensor([total + added])]),
            longest=max(row.longest, added),
        )
    row = replace(
        row, input_ids=row.input_ids[:, start:end], position_ids=row.position_ids[:, start:end]
    )
    if not isinstance(row, Packed):
        return row
    first, last = torch.searchsorted(row.rows, torch.tensor([start, end])).tolist()
    own = slice(first, last)
    experts = row.experts
    if experts is not None:  # of padding none was chosen
        experts = torch.nn.functional.pad(experts, (0, 0, 0, 0, 0, added), value=-1)[start:end]
    return replace(
        row, rows=row.rows[own] - start, tokens=_tokens(row.tokens, own), experts=experts
    )


def _tokens(tokens: Tokens, own: slice) -> Tokens:
    """The tokens of these rows with their teachers' states; their responses may have further."""
    states = []
    for one in tokens.teacher_states:
        start, stop = max(one.rows.start, own.start), min(one.rows.stop, own.stop)
        if start < stop:
            part = one.states[start - one.start : stop - one.start]
            states.append(TeacherStates(one.teacher, start - own.start, part))
    return replace(tokens.part(own), teacher_states=tuple(states), of=len(tokens))
