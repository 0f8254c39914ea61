"""The sleep of the trainer whose caller went away while it waited for a step, on a fake learner."""

from __future__ import annotations

import asyncio

from tests.trainer.models import bare_stage
from tests.world.clock import settle


class Learner:
    """Counts how often its cache was freed."""

    freed = 0

    def free_cache(self) -> None:
        self.freed += 1

    def save(self, source: str, directory: str) -> None: ...


async def test_a_trainer_that_was_woken_during_a_step_frees_no_memory_under_the_next_one() -> None:
    learner = Learner()
    stage = bare_stage(learner)
    await stage._gate.__aenter__()
    sleeping = asyncio.create_task(stage.sleep())
    await settle()
    await stage.wake()
    await stage._gate.__aexit__()
    await sleeping
    assert learner.freed == 0
    await stage.sleep()
    assert learner.freed == 1


async def test_what_a_sleeping_trainer_gathers_for_a_copy_does_not_stay_on_the_gpu() -> None:
    learner = Learner()
    stage = bare_stage(learner)
    await stage.save("model")
    assert learner.freed == 0
    await stage.sleep()
    await stage.save("model")
    assert learner.freed == 2
