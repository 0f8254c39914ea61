"""The driver's accounts: the state of a trainer, going on from it, tokens that trained nothing."""

from __future__ import annotations

import pytest

from async_opd.accounting.run_state import Cut, RunState, Waste
from async_opd.config.run_config import RunConfig
from async_opd.core.errors import StageError
from async_opd.core.reports import Captured, StepReport
from async_opd.core.samples import Header
from tests.world.config import changed, run_config
from tests.world.log import FakeLog
from tests.world.prompts import FakePrompts

CONFIG = run_config(
    rollout={"n": 2}, train={"steps": 4, "batch_size": 2}, **{"async": {"sync_steps": 2}}
)


def accounts(
    start: Cut | None = None, log: FakeLog | None = None, config: RunConfig = CONFIG
) -> RunState:
    prompts = FakePrompts(start.cursor if start else 0, teachers=("t",), images=False)
    return RunState(config, prompts, log or FakeLog(), None, start)


def trained(group: int) -> tuple[Header, ...]:
    return tuple(Header(f"p{group}/{member}", 5, 1, 0, "t") for member in range(2))


def after_two_steps() -> RunState:
    """Three groups are admitted; two of them are trained, which completes a version."""
    made = accounts()
    made.admission.try_admit(6)
    made.supply.groups(3)
    for step in (1, 2):
        made.settle(StepReport(step, trained(step - 1), (), {}))
    return made


def test_a_cut_has_what_belongs_to_the_trainers_step() -> None:
    cut = after_two_steps().cut(Captured(2))
    assert (cut.step, cut.version, cut.cursor) == (2, 1, 3)
    assert (cut.ledger.trained, cut.ledger.in_flight) == (4, ("p2/0", "p2/1"))
    assert accounts(cut).cut(Captured(2)) == cut
    with pytest.raises(StageError, match="the trainer is at step 4, the ledger at 2"):
        after_two_steps().cut(Captured(4))


def test_prompts_that_are_read_and_not_admitted_are_not_in_a_cut() -> None:
    made = after_two_steps()
    made.supply.read(5)
    cut = made.cut(Captured(2))
    assert (cut.cursor, cut.admitted) == (3, 6)
    again = accounts(cut)
    admitted = [[one.prompt.uid for one in each.supply.groups(6)] for each in (made, again)]
    assert admitted == [[f"p{number}" for number in range(3, 9)]] * 2


def test_the_remainder_of_the_last_version_is_a_version() -> None:
    made = accounts(config=changed(CONFIG, train={"steps": 3}))
    made.supply.groups(3)
    for step in (1, 2, 3):
        made.settle(StepReport(step, trained(step - 1), (), {}))
    assert made.cut(Captured(3)).version == 2


def headers(*tokens: int) -> tuple[Header, ...]:
    return tuple(Header(f"p{i}/0", n, 0, 0, "t") for i, n in enumerate(tokens))


def report(*tokens: int, skipped: str = "", duplicated: float = 0.0) -> StepReport:
    metrics = {"train/duplicate_tokens": duplicated}
    return StepReport(1, headers(*tokens), (), metrics, skipped=skipped)


def test_stale_dead_skipped_and_duplicated_tokens_are_wasted() -> None:
    waste = Waste()
    assert waste.metrics["waste/share"] == 0
    waste.step(report(10, 20, duplicated=7.0))
    assert waste.metrics["waste/duplicated_tokens"] == 7
    waste.step(report(5, skipped="loss nan", duplicated=7.0))  # a sum already: not added again
    waste.stale(headers(3, 5))
    waste.dead += 2
    assert waste.metrics == {
        "waste/requeued_tokens": 8.0,
        "waste/dead_tokens": 7.0,
        "waste/duplicated_tokens": 7.0,
        "waste/share": pytest.approx(22 / 52),
    }
