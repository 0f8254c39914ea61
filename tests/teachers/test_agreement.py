"""Agreement of a teacher with the student's rollouts."""

from __future__ import annotations

import numpy as np

from async_opd.core.samples import HiddenStates, Sample, SampledLogprobs, TopK
from teachers.agreement import Agreement
from tests.conftest import make_rollout


def test_the_gap_is_summed_over_the_tokens_of_all_samples() -> None:
    agreement = Agreement()
    two, one = make_rollout(tokens=2), make_rollout(tokens=1)  # all at -1
    topk = TopK(np.zeros((1, 3), np.int32), np.zeros((1, 3), np.float32), np.float32([-4.0]))
    agreement.add([Sample(two, SampledLogprobs(np.float32([-1.5, -2.0]))), Sample(one, topk)])
    assert agreement.drain() == {"gap": -4.5, "gap_tokens": 3.0}


def test_it_starts_again_after_each_report() -> None:
    agreement = Agreement()
    agreement.add([Sample(make_rollout(tokens=1), SampledLogprobs(np.float32([-1.5])))])
    agreement.drain()
    assert agreement.drain() == {"gap": 0.0, "gap_tokens": 0.0}


def test_hidden_states_and_empty_responses_count_for_nothing() -> None:
    agreement = Agreement()
    states = HiddenStates(np.zeros((2, 4), np.float32), "float32")
    empty = SampledLogprobs(np.zeros(0, np.float32))
    agreement.add([Sample(make_rollout(tokens=2), states), Sample(make_rollout(tokens=0), empty)])
    assert agreement.drain() == {"gap": 0.0, "gap_tokens": 0.0}
