"""Busy intervals, their union and their overlap."""

from __future__ import annotations

from dataclasses import replace

from async_opd.core.reports import Interval
from async_opd.core.samples import Group, Rollout
from async_opd.core.uid import is_traced
from async_opd.observability.activity import Activity, admitted, covered, overlap_s
from tests.conftest import make_prompt, make_rollout


def interval(start: float, end: float) -> Interval:
    return Interval("x", start, end)


def test_overlapping_work_is_one_interval_and_work_under_way_is_reported_in_parts() -> None:
    now = iter([1.0, 2.0, 4.0, 5.0])
    activity = Activity("x", clock=lambda: next(now))
    with activity.busy(), activity.busy():
        first = activity.drain()
    assert (*first, *activity.drain()) == (interval(1.0, 4.0), interval(4.0, 5.0))
    assert activity.drain_waits() == {}  # it names no causes


def test_the_union_merges_what_touches_and_an_overlap_is_the_time_in_which_all_are_busy() -> None:
    assert covered([interval(3, 4), interval(0, 2), interval(1, 3)]) == [interval(0, 4)]
    others = [[interval(1, 3), interval(2, 6)], [interval(2, 3.5)]]
    assert overlap_s([[interval(0, 4)], *others]) == 1.5
    assert overlap_s([[interval(0, 1)], [interval(1, 2)]]) == 0.0


def test_work_on_a_sample_that_the_trace_follows_is_reported_beside_the_busy_intervals() -> None:
    now = iter([1.0, 2.0, 3.0, 4.0, 5.0])
    activity = Activity("generate", lambda: next(now), "student/0")
    uid = next(uid for uid in map(str, range(10_000)) if is_traced(uid))
    other = next(uid for uid in map(str, range(10_000)) if not is_traced(uid))
    with activity.busy() as begun:
        activity.sampled(uid, begun)
        activity.sampled(other, begun)
    assert activity.span("sync", 1.5) == 2.5
    assert activity.drain() == (Interval("generate", 1.0, 3.0, "student/0"),)
    assert activity.drain_spans() == (
        Interval("generate", 1.0, 2.0, "student/0", uid),
        Interval("sync", 1.5, 4.0, "student/0 sync"),
    )
    assert activity.drain_spans() == ()


def test_idle_time_counts_once_for_the_cause_that_held_when_it_began_or_was_last_read() -> None:
    now, cause = [0.0], ["prompts"]
    activity = Activity("x", lambda: now[0], "", ("prompts", "weights"), lambda: cause[0])
    activity.drain_waits()
    now[0] = 0.5
    with activity.busy():
        now[0] = 1.0
    now[0], cause[0] = 4.0, "weights"
    with activity.busy():
        now[0] = 6.0
    now[0] = 8.0
    assert activity.drain_waits() == {"wait_prompts_s": 3.5, "wait_weights_s": 2.0}
    now[0], cause[0] = 10.0, "prompts"
    with activity.busy():
        now[0] = 14.0
        assert activity.drain_waits() == {"wait_prompts_s": 0.0, "wait_weights_s": 2.0}


async def test_the_grading_of_a_rollout_is_recorded_if_the_trace_follows_it() -> None:
    now = iter(range(10))
    activity = Activity("generate", lambda: float(next(now)), "student/0")

    async def grade(rollout: Rollout) -> Rollout:
        return replace(rollout, reward=1.0)

    graded = activity.followed("grade", grade)
    followed, other = (
        next(uid for uid in map(str, range(1000)) if is_traced(uid) is is_one)
        for is_one in (True, False)
    )
    assert (await graded(make_rollout(followed))).reward == 1.0
    await graded(make_rollout(other))
    assert activity.drain_spans() == (Interval("grade", 0, 1, "student/0", followed),)


def test_each_followed_rollout_of_a_group_is_admitted() -> None:
    groups = [Group(make_prompt(f"p{at}"), (0, 3)) for at in range(200)]
    found = admitted(groups, 5.0)
    uids = [f"p{at}/{member}" for at in range(200) for member in (0, 3)]
    assert [one.sample for one in found] == [uid for uid in uids if is_traced(uid)] != []
    assert {(one.what, one.start, one.end) for one in found} == {("admit", 5.0, 5.0)}
