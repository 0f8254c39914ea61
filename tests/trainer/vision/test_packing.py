"""Rows of samples with images: what each computes alone, by transformers' own model."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from async_opd.core.samples import Sample, VersionSpan
from async_opd.core.scores import SampledLogprobs
from async_opd.core.sequence import PROMPT, STUDENT, spans_of
from tests.trainer.vision.seeing import (
    exact_gradient,
    exact_logits,
    exact_model,
    gradients,
    rank_of,
    seen,
    student_of,
)
from tests.vision_models import FAMILIES
from trainer.batches.packing import Row, pack

pytest.importorskip("torchvision")

ROWS = {
    "text": [[], []],
    "an image each": [[0], [1], [0]],
    "several images": [[0, 1, 2], [2, 0]],
    "mixed": [[], [0], [], [1, 2], []],
}


@pytest.mark.parametrize("row", ROWS)
@pytest.mark.parametrize("family", FAMILIES)
def test_packed_log_probabilities_are_those_of_each_sample_alone(family: str, row: str) -> None:
    data = seen(family, *ROWS[row])
    rank = rank_of(student_of(family), family)
    micro_batch = data.micro_batch()
    packed = pack(data.samples)
    images = rank.student.sight.of(micro_batch.rollouts, data.encoded)
    row = Row(packed.input_ids, packed.position_ids, packed.starts, packed.longest, images=images)
    ours = rank.student.logits(row)[packed.rows]
    model = exact_model(family)
    with torch.no_grad():
        theirs = [exact_logits(model, family, one, data.encoded) for one in data.samples]
    difference = ours.log_softmax(-1) - torch.cat(theirs).log_softmax(-1)
    assert difference.abs().max() < 1e-4


def episode(samples: tuple[Sample, ...]) -> Sample:
    """The samples as the segments of one."""
    each = [sample.rollout for sample in samples]
    ids = np.concatenate([one.token_ids for one in each])
    logprobs = np.concatenate([one.rollout_logprobs for one in each])
    lengths = [((PROMPT, len(o.prompt.token_ids)), (STUDENT, len(o.continuation))) for o in each]
    rollout = replace(
        each[0],
        continuation=ids[len(each[0].prompt.token_ids) :],
        spans=spans_of(pair for one in lengths for pair in one),
        rollout_logprobs=logprobs,
        version_spans=(VersionSpan(0, 0, len(logprobs)),),
        media=tuple(media for one in each[1:] for media in one.prompt.media),
    )
    return Sample(rollout, SampledLogprobs(logprobs))


@pytest.mark.parametrize("images", [([0], [1, 2]), ([], [0], []), ([2, 0], [], [1])])
@pytest.mark.parametrize("family", FAMILIES)
def test_each_segment_of_an_episode_sees_its_own_images(
    family: str, images: tuple[list[int], ...]
) -> None:
    data = seen(family, *images)
    rank, packed = rank_of(student_of(family), family), pack([episode(data.samples)])
    shown = rank.student.sight.of([episode(data.samples).rollout], data.encoded)
    row = Row(packed.input_ids, packed.position_ids, packed.starts, packed.longest, images=shown)
    with torch.no_grad():
        ours, model = rank.student.logits(row)[packed.rows], exact_model(family)
        theirs = [exact_logits(model, family, one, data.encoded) for one in data.samples]
    assert (ours - torch.cat(theirs)).abs().max() < 1e-4


@pytest.mark.parametrize("recompute", ["none", "full"])
@pytest.mark.parametrize("family", FAMILIES)
def test_the_gradient_of_a_mixed_row_is_the_sum_of_each_samples_own(
    family: str, recompute: str
) -> None:
    from trainer.layers import recompute_activations

    data = seen(family, *ROWS["mixed"], [0])
    model = student_of(family)
    if recompute == "full":
        recompute_activations(model)
    rank_of(model, family).backward([data.micro_batch()])
    ours, theirs = gradients(model), exact_gradient(family, data)
    assert ours.keys() == theirs.keys()
    one, other = (torch.cat([g[n].flatten() for n in theirs]) for g in (ours, theirs))
    assert (one - other).norm() < 1e-4 * other.norm()
