"""Batches, messages, ledger, reports and metering."""

from __future__ import annotations

import pickle
from dataclasses import replace

import numpy as np
import pytest

from async_opd.core.batch import Batch, unpack_rollouts, unpack_samples
from async_opd.core.errors import (
    ConfigError,
    EngineStartError,
    LeaseExpired,
    LengthError,
    Problem,
    StageError,
    WeightSyncError,
)
from async_opd.core.ledger import Ledger
from async_opd.core.metering import Metering
from async_opd.core.reports import merge_reports
from async_opd.core.samples import (
    Group,
    Header,
    HiddenStates,
    Rollout,
    Sample,
    SampledLogprobs,
    VersionSpan,
)
from async_opd.core.stages import Interval, StageReport, StepReport
from async_opd.core.topic import TopicStats
from tests.conftest import make_prompt, make_rollout, make_sample


def test_a_batch_decodes_to_what_was_packed() -> None:
    (sample,) = unpack_samples([Batch.pack([make_sample("p/0", tokens=5)])])
    np.testing.assert_array_equal(sample.scores.logprobs, np.full(5, -0.5, np.float32))


def test_headers_are_readable_without_the_payload() -> None:
    batch = Batch.pack([make_rollout("p/0", "math", tokens=5, version=3, prompt_tokens=2)])
    (header,) = batch.headers
    assert (header.uid, header.tokens, header.oldest_version, header.teacher) == (
        "p/0",
        7,
        3,
        "math",
    )


def test_joined_batches_decode_in_order() -> None:
    joined = Batch.join([Batch.pack([make_rollout("a/0")]), Batch.pack([make_rollout("b/0")])])
    assert [rollout.uid for rollout in unpack_rollouts([joined])] == ["a/0", "b/0"]


def test_a_sample_among_rollouts_is_refused() -> None:
    with pytest.raises(TypeError, match="expected Rollout"):
        unpack_rollouts([Batch.pack([make_sample()])])


def test_rollouts_keep_their_top_k_and_reward_on_the_way() -> None:
    topk = np.arange(8, dtype=np.int32).reshape(4, 2)
    sent = replace(make_rollout("p/0", tokens=4), topk_ids=topk, reward=0.25)
    (came,) = unpack_rollouts([Batch.pack([sent])])
    np.testing.assert_array_equal(came.topk_ids, topk)
    assert came.reward == 0.25


def test_a_top_k_of_another_length_than_the_response_is_refused() -> None:
    with pytest.raises(LengthError, match="top-k"):
        replace(make_rollout(tokens=4), topk_ids=np.zeros((3, 2), np.int32))


def test_hidden_states_keep_their_bits_on_the_way() -> None:
    states = np.arange(8, dtype=np.uint16).reshape(4, 2)
    sample = Sample(make_rollout(tokens=4), HiddenStates(states, "bfloat16"))
    (came,) = unpack_samples([Batch.pack([sample])])
    np.testing.assert_array_equal(came.scores.states, states)


def test_an_empty_response_is_an_ordinary_rollout() -> None:
    (header,) = Batch.pack([make_rollout("p/0", tokens=0)]).headers
    assert header.staleness(7) == 0


def test_the_oldest_version_is_that_of_the_oldest_token() -> None:
    spans = (VersionSpan(4, 0, 1), VersionSpan(5, 1, 2))
    array = np.zeros(2, np.float32)
    rollout = Rollout("p/0", make_prompt(), array.astype(np.int32), array, spans, "stop")
    assert rollout.oldest_version == 4


@pytest.mark.parametrize("spans", [(), (VersionSpan(0, 0, 1),), (VersionSpan(0, 1, 2),)])
def test_spans_that_leave_a_token_without_a_version_are_refused(
    spans: tuple[VersionSpan, ...],
) -> None:
    array = np.zeros(2, np.float32)
    with pytest.raises(LengthError, match="do not partition"):
        Rollout("p/0", make_prompt(), array.astype(np.int32), array, spans, "stop")


def test_scores_of_another_length_than_the_response_are_refused() -> None:
    with pytest.raises(LengthError, match="4 response tokens"):
        Sample(make_rollout(tokens=4), SampledLogprobs(np.zeros(3, np.float32)))


def header(uid: str) -> Header:
    return Header(uid, 1, 1, 0, "t")


def test_a_sample_trained_twice_stops_the_run() -> None:
    ledger = Ledger(1)
    ledger.admitted([make_prompt("p")])
    ledger.trained([header("p/0")], 1)
    with pytest.raises(StageError, match="came twice"):
        ledger.trained([header("p/0")], 1)


def test_the_ledger_counts_every_rollout_of_a_group() -> None:
    ledger = Ledger(3)
    ledger.admitted([make_prompt("p")])
    ledger.trained([header("p/1")], 1)
    assert (ledger.counts["in_flight"], ledger.counts["trained"]) == (2, 1)


def test_a_copy_of_a_buried_sample_that_is_trained_or_too_old_changes_nothing() -> None:
    ledger = Ledger(1)
    ledger.admitted([make_prompt("p")])
    ledger.dead_lettered(header("p/0"))
    ledger.trained([header("p/0")], 1)
    assert ledger.requeued([header("p/0")]) == []
    assert (ledger.counts["trained"], ledger.counts["dead_lettered"]) == (0, 1)


def test_a_sample_that_came_too_late_runs_again_alone_and_stays_in_flight() -> None:
    ledger = Ledger(3)
    prompt = make_prompt("p")
    ledger.admitted([prompt])
    assert ledger.requeued([header("p/1")]) == [Group(prompt, (1,))]
    assert ledger.counts["in_flight"] == 3


def test_a_pool_waits_only_if_every_replica_does() -> None:
    busy = StageReport(waits_for="")
    assert merge_reports([StageReport(waits_for="prompts"), busy]).waits_for == ""


def test_a_pool_has_the_version_of_its_oldest_replica() -> None:
    reports = [StageReport(gauges={"version": 4.0}), StageReport(gauges={"version": 3.0})]
    assert merge_reports(reports).gauges["version"] == 3.0


def stats() -> TopicStats:
    return TopicStats(1, 2, 3, 4, 5, 6, 7, 8, 9)


def metered(start: float, now: float, **pools: tuple[float, float]) -> dict[str, float]:
    times = iter([start, start, now])
    metering = Metering(clock=lambda: next(times))
    metering.start()
    reports = {
        name.replace("__", "/"): StageReport(
            counters={"tokens": 10.0}, busy=(Interval(name, *busy),)
        )
        for name, busy in pools.items()
    }
    step = StepReport(1, (header("a/0"), header("b/0")), (0, 2), {"loss/total": 1.0})
    return metering.step(step, reports, {"scored": stats()})


def test_overlap_is_the_share_of_time_in_which_all_three_stages_computed() -> None:
    metrics = metered(0, 10, rollout=(0, 6), teacher__a=(2, 7), train=(4, 9))
    assert metrics["perf/overlap"] == pytest.approx(0.2)


def test_any_teacher_counts_as_scoring() -> None:
    metrics = metered(0, 10, rollout=(0, 10), teacher__a=(0, 3), teacher__b=(5, 6), train=(0, 10))
    assert metrics["perf/overlap"] == pytest.approx(0.4)


def test_rates_are_per_second_since_the_step_before() -> None:
    assert metered(5, 10, train=(5, 6))["train/tokens_per_s"] == pytest.approx(2.0)


def test_busy_seconds_of_replicas_side_by_side_add_up() -> None:
    times = iter([0.0, 0.0, 10.0])
    metering = Metering(clock=lambda: next(times))
    metering.start()
    pool = StageReport(busy=(Interval("x", 0, 4), Interval("x", 2, 6)))
    metrics = metering.step(StepReport(1, (), (), {}), {"rollout": pool}, {})
    assert (metrics["rollout/busy_s"], metrics["rollout/busy"]) == (8.0, 0.6)


def test_staleness_is_reported_as_mean_and_maximum() -> None:
    metrics = metered(0, 1, train=(0, 1))
    assert (metrics["staleness/mean"], metrics["staleness/max"]) == (1.0, 2.0)


def test_every_count_of_a_topic_is_a_metric() -> None:
    assert metered(0, 1, train=(0, 1))["queue/scored/leased"] == 2.0


@pytest.mark.parametrize(
    "error",
    [
        StageError("student/0", "cause", "remedy"),
        EngineStartError("t", "cause"),
        WeightSyncError("s", "cause", "remedy"),
        LeaseExpired("scored", 3),
        ConfigError([Problem("f", "k", "m", "r")]),
    ],
)
def test_errors_survive_the_way_between_processes(error: Exception) -> None:
    assert str(pickle.loads(pickle.dumps(error))) == str(error)


def test_a_dead_letter_is_not_expected_any_more() -> None:
    ledger = Ledger(2)
    ledger.admitted([make_prompt("p")])
    ledger.dead_lettered(header("p/0"))
    assert (ledger.expects(header("p/0")), ledger.expects(header("p/1"))) == (False, True)
    assert (ledger.counts["dead_lettered"], ledger.counts["in_flight"]) == (1, 1)


def test_a_replacement_can_be_one_rollout_of_a_prompt() -> None:
    (group,) = Ledger(4).admitted([make_prompt("p")], members=1)
    assert group.members == (0,)
