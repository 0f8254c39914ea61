"""Queue, scorer and trainer as new after the trainer's death, on made-up processes."""

from __future__ import annotations

from typing import Any, cast

import pytest

from async_opd.cluster.singles import Singles, TrainerBox
from async_opd.core.config import RunConfig
from async_opd.core.errors import ProcessDied, StageTimeout

DIED = ProcessDied("trainer", "its process died")


class Box:
    """A stage and its process; ``hangs`` in whatever it is asked."""

    def __init__(self, name: str, events: list[str], built: bool = True, hangs: bool = False):
        self.name, self.events, self.built, self.hangs = name, events, built, hangs
        self.remote: Any = self
        self.others: tuple[Box, ...] = ()

    @property
    def ranks(self) -> tuple[Box, ...]:
        return (self, *self.others)

    async def end(self, bound: float) -> None:
        await TrainerBox.end(cast(TrainerBox, self), bound)

    async def build(self) -> None:
        self.events.append(f"build {self.name}")

    async def hand_over(self, bound: float) -> None:
        await self.call("hand_over", bound)

    async def call(self, method: str, timeout_s: float) -> None:
        if self.hangs:
            raise StageTimeout(self.name, f"{method} took longer than {timeout_s:g} s")
        self.events.append(f"{method} {self.name}")

    async def is_built(self, timeout_s: float) -> bool:
        if self.hangs:
            raise StageTimeout(self.name, "a question took too long")
        return self.built

    def restart(self) -> None:
        self.events.append(f"restart {self.name}")


def singles(events: list[str], hangs: str = "", built: bool = False, tries: int = 5) -> Singles:
    config = RunConfig.model_validate(
        {
            "student": {"model": "student"},
            "teachers": {"t": {"model": "t"}},
            "data": {"train": "prompts.jsonl"},
            "supervision": {"tries": tries, "delay_s": 1e-3},
        }
    )
    boxes: list[Any] = [
        Box(name, events, built, hangs=name == hangs) for name in ("queue", "scorer", "trainer")
    ]
    return Singles(config, lambda text: None, *boxes)


async def test_the_scorer_ends_before_the_queue_and_all_are_built_again() -> None:
    events: list[str] = []
    await singles(events).renew(DIED)
    assert events == [
        "hand_over scorer",
        "close queue",
        "build queue",
        "build scorer",
        "build trainer",
    ]


@pytest.mark.parametrize("hangs", ["queue", "scorer", "trainer"])
async def test_one_that_hangs_gets_another_process(hangs: str) -> None:
    events: list[str] = []
    await singles(events, hangs).renew(DIED)
    assert f"restart {hangs}" in events
    assert f"build {hangs}" in events


async def test_a_trainer_that_is_not_dead_but_stuck_gets_another_process() -> None:
    events: list[str] = []
    await singles(events, built=True).renew(DIED)
    assert events[0] == "restart trainer"


async def test_too_many_deaths_of_the_trainer_are_its_error() -> None:
    made = singles([], tries=1)
    await made.renew(DIED)
    with pytest.raises(ProcessDied, match="its process died"):
        await made.renew(DIED)


async def test_every_rank_of_a_trainer_that_is_not_dead_gets_another_process() -> None:
    events: list[str] = []
    made = singles(events, built=True)
    trainer: Any = made.trainer
    trainer.others = (Box("trainer/1", events), Box("trainer/2", events, hangs=True))
    await made.renew(DIED)
    restarted = {event for event in events if event.startswith("restart trainer")}
    assert restarted == {"restart trainer", "restart trainer/1", "restart trainer/2"}
