"""A whole run on fakes whose student answers in several spans: nothing on the way needs to know."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from async_opd.core.samples import Prompt, Rollout, VersionSpan
from tests.sequences import Parts, same, sequence
from tests.world.run import world
from tests.world.students import FakeStudent

TURNS: list[Parts] = [
    [("student", 2), ("tool", 3), ("student", 1)],
    [("user", 1), ("student", 4), ("tool", 2)],
    [("student", 3)],
    [("tool", 2)],
]


async def test_what_is_trained_is_the_sequence_that_was_sampled(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made: dict[str, Rollout] = {}

    def rollout(self: FakeStudent, prompt: Prompt, index: int, version: int) -> Rollout:
        number = int(prompt.uid[1:]) + index
        one = sequence(f"{prompt.uid}/{index}", TURNS[number % 4], prompt=2, seed=number)
        length = len(one.response_ids)
        spans = (VersionSpan(version, 0, length),) if length else ()
        made[one.uid] = replace(one, prompt=prompt, version_spans=spans)
        return made[one.uid]

    monkeypatch.setattr(FakeStudent, "rollout", rollout)
    run = world()
    trained: dict[str, Rollout] = {}
    take = run.trainer.batcher.take

    async def watched(version: int) -> Any:
        taken = await take(version)
        trained.update((sample.rollout.uid, sample.rollout) for sample in taken.samples)
        return taken

    monkeypatch.setattr(run.trainer.batcher, "take", watched)
    await run.run()
    assert len(trained) == 24
    assert all(same(made[uid], found) for uid, found in trained.items())
