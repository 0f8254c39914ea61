"""Prompts that cannot be sampled, and what takes the place of rollouts that are lost."""

from __future__ import annotations

from collections.abc import Collection
from contextlib import suppress
from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st

from async_opd.accounting import replacements
from async_opd.accounting.admission import Admission
from async_opd.accounting.dead_letters import DeadLetters
from async_opd.accounting.ledger import Ledger
from async_opd.accounting.replacements import MAX_CONSECUTIVE_REFUSED, MAX_RESAMPLED, PromptSupply
from async_opd.core.errors import SourceError, StageError
from async_opd.core.reports import StepReport
from async_opd.core.samples import NO_VERSION, DeadLetter, Header, Prompt
from tests.world.log import FakeLog
from tests.world.prompts import FakePrompts


def stream(bad: Collection[int] = ()) -> FakePrompts:
    """Prompts p0, p1, … of text; those whose numbers are ``bad`` cannot be sampled."""
    return FakePrompts(bad=bad, teachers=("t",), images=False)


ONLY_BAD = range(10**6)


@dataclass
class Desk:
    supply: PromptSupply
    ledger: Ledger
    admission: Admission
    letters: DeadLetters
    log: FakeLog


def desk(
    prompts: FakePrompts | None = None, *, n: int = 2, whole: bool = False, share: float = 0.01
) -> Desk:
    ledger, log, letters = Ledger(n), FakeLog(), DeadLetters({"t": share})
    admission = Admission(batch_size=4, sync_steps=1, staleness_threshold=1.0, steps=50)
    supply = PromptSupply(
        prompts or stream(), ledger, admission, letters, log, whole_groups=n if whole else None
    )
    return Desk(supply, ledger, admission, letters, log)


def lost(uid: str, stage: str = "grader") -> DeadLetter:
    return DeadLetter(Header(uid, 3, 0, NO_VERSION, "t"), "it raised", stage)


def admitted(made: Desk, groups: int = 1) -> None:
    made.supply.groups(made.admission.try_admit(made.ledger.group_size, groups))


def test_a_prompt_that_cannot_be_sampled_counts_as_its_rollouts_and_the_next_one_comes() -> None:
    made = desk(stream({0, 2}), n=2)
    assert [group.prompt.uid for group in made.supply.groups(2)] == ["p1", "p3"]
    assert made.log.dead == ["p0/0", "p0/1", "p2/0", "p2/1"]
    assert {one.reason for one in made.log.letters} == {"no tokens"}
    assert made.letters.metrics == {"dead_letters/prompt": 4.0}
    assert made.ledger.counts["dead_lettered"] == 4
    assert made.log.summary == {"ledger/dead_lettered": 4.0}


@pytest.mark.parametrize(
    ("share", "cause"),
    [
        (0.01, r"prompt: 11 rollouts .* allowed are 10 .* p5/0: no tokens"),
        (1.0, f"{MAX_CONSECUTIVE_REFUSED} prompts cannot be sampled; the last: no tokens"),
    ],
)
def test_prompts_of_which_none_can_be_sampled_end_the_run_whatever_share_is_allowed(
    share: float, cause: str
) -> None:
    with pytest.raises(StageError, match=cause):
        desk(stream(ONLY_BAD), share=share).supply.groups(1)


class Unreadable(FakePrompts):
    """The second prompt cannot be read."""

    def next(self, count: int) -> list[Prompt | DeadLetter]:
        if self.cursor:
            raise SourceError("p.jsonl", "cannot be read: [Errno 5] Input/output error")
        return super().next(1)


def test_a_source_that_cannot_be_read_ends_the_run_with_ledger_and_budget_in_agreement() -> None:
    made = desk(Unreadable(), n=2)
    with pytest.raises(StageError, match="Input/output error"):
        admitted(made, 4)
    assert made.admission.admitted == len(made.ledger.state().in_flight) == 2


@pytest.mark.parametrize("bad", [set(), {1}])
def test_a_lost_rollout_ends_alone_and_is_replaced_by_one_of_the_next_prompt_that_can_be_sampled(
    bad: set[int],
) -> None:
    made = desk(stream(bad))
    admitted(made)
    assert made.supply.ended_by(lost("p0/1")) == ("p0/1",)
    (group,) = made.supply.replace(lost("p0/1"))
    assert (group.prompt.uid, group.members) == (f"p{1 + len(bad)}", (0,))
    assert made.log.dead == ["p0/1", *(f"p{number}/0" for number in bad)]
    assert made.admission.admitted == 2


def test_a_member_of_a_whole_group_is_sampled_again_and_then_its_group_replaced() -> None:
    made = desk(whole=True, n=3)
    admitted(made)
    assert made.supply.ended_by(lost("p0/1")) == ()
    for _ in range(MAX_RESAMPLED):
        (group,) = made.supply.replace(lost("p0/1"))
        assert (group.prompt.uid, group.members) == ("p0", (1,))
    assert (made.log.letters, len(made.log.lines)) == ([], 1)
    assert made.supply.ended_by(lost("p0/1")) == ("p0/1", "p0/0", "p0/2")
    groups = made.supply.replace(lost("p0/1"))
    assert [(g.prompt.uid, g.members) for g in groups] == [("p1", (0, 1, 2))]
    # what comes late of the group changes nothing
    assert made.supply.ended_by(lost("p0/0")) == ()
    assert made.supply.replace(lost("p0/0")) == []
    assert sorted((one.header.uid, one.stage) for one in made.log.letters) == [
        ("p0/0", "group"),
        ("p0/1", "grader"),
        ("p0/2", "group"),
    ]
    assert made.ledger.counts["in_flight"] == 3


def test_a_grader_that_always_fails_ends_the_run() -> None:
    made = desk(whole=True)
    admitted(made)

    def fail_for_ever() -> None:
        uids = list(made.ledger.state().in_flight)
        while uids:
            for group in made.supply.replace(lost(uids.pop())):
                uids += [f"{group.prompt.uid}/{member}" for member in group.members]

    with pytest.raises(StageError, match=r"11 rollouts .* it raised"):
        fail_for_ever()


@pytest.mark.parametrize("whole", [False, True])
def test_a_lost_rollout_is_replaced_although_the_budget_is_exceeded(whole: bool) -> None:
    made = desk(whole=whole)
    admitted(made, 4)
    over = made.admission.budget + 8
    made.admission.restore(0, over)
    for _ in range(MAX_RESAMPLED + 1 if whole else 1):
        groups = made.supply.replace(lost("p0/1"))
    assert sum(len(group.members) for group in groups) == (2 if whole else 1)
    assert made.admission.admitted == over


def test_places_that_the_end_of_a_run_left_open_in_a_group_are_filled_one_by_one() -> None:
    made = desk(n=4)
    made.admission.restore(0, 6)
    groups = made.supply.complete()
    assert [(group.prompt.uid, group.members) for group in groups] == [("p0", (0,)), ("p1", (0,))]
    assert made.admission.admitted == 8
    assert made.supply.complete() == []
    for _ in range(20):  # an answer that cannot be graded counts once
        made.supply.ungraded([lost("eval p0/0")])
    assert len(made.log.letters) == 1


def test_samples_of_a_step_that_was_left_out_are_dead_letters_beyond_all_shares() -> None:
    made = desk(share=0.0)
    admitted(made)
    headers = tuple(Header(f"p0/{i}", 3, 0, 0, "t") for i in range(2))
    made.supply.skipped(StepReport(1, headers, (0, 0), {}, skipped="loss nan"))
    assert [one.reason for one in made.log.letters] == ["step 1 was skipped: loss nan"] * 2
    assert made.log.lines == ["step 1 was skipped: loss nan; samples: p0/0, p0/1"]
    assert made.letters.metrics == {"dead_letters/trainer": 2.0}
    assert made.ledger.counts["in_flight"] == 0


@given(
    whole=st.booleans(),
    bad=st.sets(st.integers(0, 30), max_size=8),
    losses=st.lists(st.integers(0, 100), max_size=60),
)
def test_whatever_is_lost_the_budget_stays_filled_and_every_sample_has_one_state(
    whole: bool, bad: set[int], losses: list[int]
) -> None:
    made = desk(stream(bad), whole=whole, share=1.0)
    admitted(made, 4)
    budget = made.admission.admitted
    for pick in losses:
        uids = made.ledger.state().in_flight
        made.supply.replace(lost(uids[pick % len(uids)]))
        assert made.admission.admitted == made.ledger.counts["in_flight"] == budget
    assert len(made.log.letters) == made.ledger.counts["dead_lettered"]


def accounts_fit(made: Desk) -> bool:
    """Whether a checkpoint of this moment can be resumed, and its last batch filled."""
    counts = made.ledger.counts
    in_flight = counts["in_flight"]
    taken = in_flight + counts["dead_lettered"]
    return made.admission.admitted == in_flight and made.supply.taken <= taken


@given(bad=st.sets(st.integers(0, 80), min_size=1), n=st.integers(1, 4), groups=st.integers(1, 64))
def test_too_many_bad_prompts_leave_accounts_that_fit(bad: set[int], n: int, groups: int) -> None:
    made = desk(stream(bad), n=n, share=0.003)
    made.admission.advance(40)
    with suppress(StageError):
        admitted(made, groups)
    assert accounts_fit(made)


@given(n=st.integers(1, 4), whole=st.booleans(), losses=st.integers(1, 12))
def test_too_many_lost_rollouts_leave_accounts_that_fit(n: int, whole: bool, losses: int) -> None:
    made = desk(n=n, whole=whole, share=0.002)
    made.admission.advance(40)
    admitted(made, 16)
    with suppress(StageError):
        for number in range(losses * (MAX_RESAMPLED + 1)):
            made.supply.replace(lost(f"p{number // (MAX_RESAMPLED + 1)}/0"))
    assert accounts_fit(made)


def test_a_run_that_has_to_end_takes_no_further_prompts() -> None:
    prompts = stream(ONLY_BAD)
    made = desk(prompts, share=0.01)
    with pytest.raises(StageError, match="are dead letters"):
        admitted(made)
    assert made.supply.taken <= 12
    read = prompts.cursor
    with pytest.raises(StageError, match="are dead letters"):
        admitted(made)
    assert prompts.cursor == read


def late(uid: str, tokens: int = 900) -> Header:
    return Header(uid, tokens, 0, 0, "t")


def test_a_rollout_that_comes_too_late_three_times_is_one_warning() -> None:
    made = desk()
    admitted(made, groups=2)
    for times in range(1, 6):
        groups = made.supply.stale([late("p0/1", 100 * times)])
        assert [(group.prompt.uid, group.members) for group in groups] == [("p0", (1,))]
        assert len(made.log.warnings) == (times >= 3)
    (warning,) = made.log.warnings
    assert warning.startswith("p0/1 was sampled 3 times")
    assert "with 300 tokens" in warning
    assert "→ raise async.max_version_lag" in warning
    assert made.ledger.counts["requeued"] == 5
    for _ in range(2):
        made.supply.stale([late("p0/0")])
    made.ledger.trained([late("p0/0")], 1)
    assert made.supply.stale([late("p0/0")]) == []  # a late copy of a trained rollout
    assert made.log.warnings == [warning]


def test_only_rollouts_that_came_too_late_last_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replacements, "REMEMBERED_STALE", 1)
    made = desk()
    admitted(made)
    for uid in ("p0/0", "p0/0", "p0/1", "p0/0"):
        made.supply.stale([late(uid)])
    assert made.log.warnings == []
