"""Held rows of a VLM student: one has an image, and changes with the tower."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from async_opd.core.samples import Sample
from async_opd.core.scores import SampledLogprobs
from tests.trainer.vision.seeing import exact_logits, exact_model, processor_of, rank_of, student_of
from tests.vision_models import FAMILIES, SIZE
from trainer.rank import Rank
from trainer.student.reference import BEHIND, packed, picture, rows_to_hold

LONGEST = 700


@pytest.fixture(scope="module", params=FAMILIES)
def family(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def rank(family: str) -> Rank:
    return rank_of(student_of(family), family)


def rows_of(rank: Rank) -> Any:
    return rows_to_hold(SIZE, LONGEST, rank.student.sight)


def test_the_last_row_alone_has_an_image_and_a_token_for_it(rank: Rank, family: str) -> None:
    assert [len(row.media) for row in rows_of(rank)] == [0, 0, 0, 0, 0, 1]
    processor, rows = processor_of(family), rows_of(rank)
    counts = [int(np.isin(row.ids, processor.unsampled_ids).sum()) for row in rows]
    assert counts == [0, 0, 0, 0, 0, 1]


def test_log_probabilities_are_those_of_transformers(rank: Rank, family: str) -> None:
    rows = rows_of(rank)
    rollout = rows[-1].rollout(
        processor_of(family).expand(rows[-1].ids[:-BEHIND], [rows[-1].encoded])
    )
    sample = Sample(rollout, SampledLogprobs(np.zeros(BEHIND, np.float32)))
    with torch.no_grad():
        table = exact_logits(exact_model(family), family, sample, rows[-1].images).log_softmax(-1)
    exact = table.numpy()[np.arange(BEHIND), rows[-1].ids[-BEHIND:]]
    np.testing.assert_allclose(rank.student.reference(rows).logprobs[-1], exact, atol=1e-4)


def test_the_row_with_the_image_alone_changes_with_the_tower(family: str) -> None:
    rank = rank_of(student_of(family), family)
    rows, before = rows_of(rank), rank.student.reference(rows_of(rank)).logprobs
    with torch.no_grad():
        for name, parameter in rank.model.named_parameters():
            if "visual" in name or "vision_tower" in name:
                parameter.add_(torch.randn_like(parameter) * 0.1)
    after = rank.student.reference(rows).logprobs
    moved = [float(np.abs(a - b).max()) for a, b in zip(before, after, strict=True)]
    assert max(moved[:-1]) < 1e-5
    assert moved[-1] > 1e-3


def test_rows_are_of_text_where_the_image_has_no_room(rank: Rank) -> None:
    assert not any(row.media for row in rows_to_hold(SIZE, 20, rank.student.sight))


def test_the_image_is_the_same_each_time_and_other_rows_are_packed_as_text(rank: Rank) -> None:
    assert picture() == picture()
    rows = [replace(row) for row in rows_of(rank)[:2]]
    assert packed(rows, rank.student.sight).images is None
