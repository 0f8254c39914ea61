"""The report of a teacher's replica: counters, and agreement with the student's rollouts."""

from __future__ import annotations

import numpy as np

from async_opd.core.samples import Sample
from async_opd.core.scores import HiddenStates, SampledLogprobs, TopK
from teachers.meter import COUNTERS, ScoringMeter
from tests.conftest import make_rollout


def gap(meter: ScoringMeter) -> tuple[float, float]:
    counters = meter.report().counters
    return counters["gap"], counters["gap_tokens"]


def test_the_gap_is_summed_over_tokens_and_counters_start_again_after_each_report() -> None:
    meter = ScoringMeter()
    two, one = make_rollout(tokens=2), make_rollout(tokens=1)  # all at -1
    topk = TopK(np.zeros((1, 3), np.int32), np.zeros((1, 3), np.float32), np.float32([-4.0]))
    meter.add([Sample(two, SampledLogprobs(np.float32([-1.5, -2.0]))), Sample(one, topk)])
    assert gap(meter) == (-4.5, 3.0)
    meter.add([Sample(make_rollout(tokens=1), SampledLogprobs(np.float32([-1.5])))])
    assert meter.report().counters["samples"] == 1
    again = meter.report().counters
    assert {again[name] for name in COUNTERS} == {0.0}


def test_hidden_states_and_empty_responses_add_no_gap() -> None:
    meter = ScoringMeter()
    states = HiddenStates(np.zeros((2, 4), np.float32), "float32")
    empty = SampledLogprobs(np.zeros(0, np.float32))
    meter.add([Sample(make_rollout(tokens=2), states), Sample(make_rollout(tokens=0), empty)])
    assert gap(meter) == (0.0, 0.0)
