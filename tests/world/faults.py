"""What goes wrong on fakes: prompts, graders and teachers that fail, copies, queues that die."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from hypothesis import strategies as st

from async_opd.accounting.audit import Audit
from async_opd.core.samples import Rollout
from async_opd.grading.graders import GradeError
from tests.world.clock import settle
from tests.world.prompts import FakePrompts
from tests.world.queue import MortalQueue
from tests.world.run import World

AMONG = 12  # prompts


@dataclass(frozen=True)
class Faults:
    """``prompts`` cannot be sampled, ``answers`` not be scored; a share of them is not graded.

    After so many turns of the event loop each, ``strokes``: the queue dies, or everything in flight
    gets a copy, as when all leases expire. Without ``images`` no prompt has any.
    """

    prompts: frozenset[int] = frozenset()
    answers: frozenset[str] = frozenset()
    ungraded: float = 0.0
    strokes: tuple[tuple[int, str], ...] = ()
    images: bool = True

    def stream(self, cursor: int) -> FakePrompts:
        """The prompts, from a cursor on."""
        return FakePrompts(cursor, self.prompts, images=self.images)

    def into(self, world: World, seed: int) -> None:
        """The stages of a world fail from now on."""
        chance = random.Random(seed)

        async def grade(rollout: Rollout) -> Rollout:
            await world.pace.wait()
            if chance.random() < self.ungraded:
                raise GradeError("grader", f"rollout {rollout.uid}: it raised")
            return rollout

        for teacher in world.teachers.values():
            teacher.poison = self.answers
        for student in world.students:
            student.grade = grade  # type: ignore[method-assign]

    @contextmanager
    def striking(self, queue: Callable[[], MortalQueue]) -> Iterator[None]:
        """What strikes while a run goes on; ``queue()`` is its queue now."""
        striking = asyncio.create_task(self.strike(queue))
        try:
            yield
        finally:
            striking.cancel()

    async def strike(self, queue: Callable[[], MortalQueue]) -> None:
        """Supervision makes the copies: between two pipelines nothing is issued for the first."""
        for turns, stroke in self.strokes:
            await settle(turns)
            if stroke == "queue":
                queue().die()
            else:
                queue().reissue.set()


NO_FAULTS = Faults()

faults = st.builds(
    Faults,
    prompts=st.frozensets(st.integers(0, AMONG), max_size=4),
    answers=st.frozensets(
        st.builds("p{}/{}".format, st.integers(0, AMONG), st.integers(0, 3)), max_size=4
    ),
    ungraded=st.sampled_from([0.0, 0.1, 0.4]),
    strokes=st.lists(
        st.tuples(st.integers(0, 150), st.sampled_from(["queue", "copies"])), max_size=4
    ).map(tuple),
)


def assert_one_state_each(found: Audit, samples: int) -> None:
    """So many are trained, once each; every other admitted sample is a dead letter, once."""
    assert (found.duplicated, found.in_flight, found.lost) == ((), (), ())
    states = Counter(found.trained) + Counter(found.dead_lettered)
    assert set(states.values()) == {1}
    assert len(found.trained) == samples
