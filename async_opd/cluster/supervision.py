"""Supervises the singleton actors, and rebuilds all of them with the trainer."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any, NoReturn

from async_opd.cluster.remote import Remote
from async_opd.cluster.rollouter_replicas import RollouterActor
from async_opd.cluster.singleton_actors import (
    QueueActor,
    ScorerActor,
    SingletonActor,
    TrainerActor,
    end_built,
)
from async_opd.config.run_config import RunConfig
from async_opd.core.errors import Displaced, ProcessDied, ProcessRestarts, StageError, StageTimeout
from async_opd.core.stages import TRAINER
from async_opd.processes.events import Event, State
from async_opd.processes.members import Member, MemberSet, Policy, Rebuild
from async_opd.waiting.deadline import gather_or_cancel, race
from async_opd.waiting.waits import Waits


@dataclass
class SingletonActors:
    """Supervises them, and rebuilds them before the run goes on from a checkpoint."""

    config: RunConfig
    notify: Callable[[str], None]
    queue: QueueActor
    scorer: ScorerActor
    rollouter: RollouterActor
    trainer: TrainerActor
    waits: Waits

    def __post_init__(self) -> None:
        """Deaths are counted from here on, over all restarts of the trainer."""
        self._step: Callable[[], int] = int
        self._reissue: Callable[[], object] = int  # does nothing
        self._bound = self.config.supervision.timeout_s
        restarted = [self.queue, self.scorer, self.rollouter]
        self.members = self._members("stages", restarted, self._rebuilt)
        self.trainers = self._members(TRAINER, [self.trainer], self._as_new)

    def _members(
        self, name: str, singles: Sequence[SingletonActor], rebuild: Rebuild[SingletonActor]
    ) -> MemberSet[SingletonActor]:
        """A member set that needs every one of its members."""
        bound = self._bound
        policy = Policy[SingletonActor](
            supervision=self.config.supervision,
            serve=lambda member: gather_or_cancel(
                *(_raise_at_death(r, bound) for r in member.value.ranks)
            ),
            alive=lambda member: gather_or_cancel(
                *(_raise_unless_built(r, bound) for r in member.value.ranks)
            ),
            leave=lambda member: _ended(member, bound),
            displaced=lambda member: _first_displaced(member.value.ranks),
            rebuild=rebuild,
            reached=lambda member: self._step(),
            needed=len(singles),
            start_s=self.config.timeouts.engine_start_s,
        )
        named = {actor.remote.name: actor for actor in singles}
        members = MemberSet(name, named, policy, waits=self.waits)

        def follow(event: Event) -> None:
            self.notify(str(event))
            if event.member == self.queue.remote.name and event.after is State.SERVING:
                self._reissue()
            if event.after is State.GONE:  # ends calls that wait for its restart
                for rank in members[event.member].value.ranks:
                    rank.kill()

        members.listen(follow)
        return members

    async def supervise(
        self, reissue: Callable[[], Coroutine[Any, Any, None]], step: Callable[[], int]
    ) -> None:
        """See async_opd.pipeline.Stages. Raises ProcessDied when the trainer dies."""
        self._step = step
        async with asyncio.TaskGroup() as group:
            self._reissue = lambda: (
                group.create_task(reissue()),
                group.create_task(self._until_the_queue_is_reached()),
            )
            group.create_task(self.members.run())
            group.create_task(self.rollouter.supply())
            group.create_task(self._until_the_trainer_dies())

    async def rebuild_all(self, error: StageError) -> None:
        """Rebuilds all singleton actors after the trainer's death.

        A death or a failure meanwhile counts as one more death of the trainer. Raises the last
        error after too many.
        """
        (trainer,) = self.trainers.all
        self._reissue = int
        self.trainers.fail(trainer, trainer.incarnation, error)
        await self.trainers.mend(trainer)

    async def _until_the_trainer_dies(self) -> None:
        (trainer,) = self.trainers.all
        await self.trainers.watch(trainer)
        error = trainer.failure
        assert isinstance(error, StageError)
        prefix = "" if error.stage == TRAINER else f"{error.stage}: "
        raise ProcessDied(TRAINER, prefix + error.cause, error.remedy) from error

    async def _until_the_queue_is_reached(self) -> None:
        """Ends processes that do not reach the queue's new process in time.

        One whose machine was cut off when Ray published where that is learns it five minutes later,
        by Ray's keepalive: its calls wait until then. A new process asks at once. Each end counts
        in ``supervision.max_restarts``, that of an engine too: its stage counts it as a death.
        """

        def is_killed(engine: Remote, error: StageError) -> None:
            self.notify(str(error))
            engine.kill()  # its stage rebuilds it

        checks = [
            self._unless_reached(rank, partial(members.fail, one, one.incarnation))
            for members in (self.members, self.trainers)
            for one in members.all
            for rank in one.value.ranks
            if rank is not self.queue.remote
        ]
        engines = self.rollouter.engines
        checks += [self._unless_reached(one, partial(is_killed, one)) for one in engines]
        await gather_or_cancel(*checks)

    async def _unless_reached(self, remote: Remote, lost: Callable[[StageError], object]) -> None:
        """Calls ``lost`` with its error if a process does not reach the queue in time."""
        queue = self.members.all[0]
        asked = remote.reach(self.queue.remote, self._bound)
        try:
            with suppress(ProcessDied):  # it is dead, which its own supervision notices
                # The queue's next process is asked for anew: this call would wait for its start.
                await race(asked, self.members.until(lambda: queue.state is not State.SERVING))
        except StageError as error:
            cause = f"it does not reach the queue's new process: {error}"
            lost(StageTimeout(remote.name, cause, error.remedy))

    async def _rebuilt(self, member: Member[SingletonActor]) -> SingletonActor:
        """Rebuilds a member in a process that Ray has started already."""
        try:
            await member.value.build()
        except StageError as failed:
            if not isinstance(failed.__cause__, ProcessDied):
                member.value.restart()
            raise
        return member.value

    async def _as_new(self, member: Member[SingletonActor]) -> SingletonActor:
        """Rebuilds the trainer, and replaces all others with it."""
        queue, scorer, rollouter = self.members.all
        try:
            await self.trainer.end(self._bound)
            await self._end(self.rollouter, self.rollouter.stop)
            await self.rollouter.halt_replicas(self._bound)
            await self._end(self.scorer, self.scorer.hand_over)
            close = self.queue.remote.call
            await self._end(self.queue, lambda bound: close("close", timeout_s=bound))
            await self.trainer.placed()  # the others' place is its own: their waits have no bound
            await self.queue.build()
            self.members.replaced(queue, self.queue)
            await self._built_beside(queue)
        except StageError:
            self.trainer.restart()
            raise
        self.members.replaced(scorer, self.scorer)
        self.members.replaced(rollouter, self.rollouter)
        return member.value

    async def _built_beside(self, queue: Member[SingletonActor]) -> None:
        """Builds all others. Raises the queue's failure as soon as the queue fails."""

        async def queue_failure() -> NoReturn:
            await self.members.watch(queue)
            assert queue.failure is not None
            raise queue.failure

        async def others() -> None:
            await self.scorer.build()  # first: it puts teachers to sleep on the trainer's GPUs
            await gather_or_cancel(self.rollouter.build(), self.trainer.build())

        await race(others(), queue_failure())

    async def _end(self, actor: SingletonActor, ending: Callable[[float], Awaitable[Any]]) -> None:
        """Stops its object; restarts its process if that fails, or if it has no object yet."""
        try:
            if await actor.remote.is_built(self._bound):
                await ending(self._bound)
            else:
                actor.remote.restart()
        except ProcessRestarts:
            await end_built(actor.remote, self._bound)
        except ProcessDied:
            return
        except StageError as error:
            self.notify(f"{actor.remote.name} did not end well: {error}")
            actor.remote.restart()


async def _first_displaced(ranks: Sequence[Remote]) -> Displaced | None:
    """The error of the first process that lost its machine, if one did."""
    found = await gather_or_cancel(*(rank.displaced() for rank in ranks))
    return next(filter(None, found), None)


async def _ended(member: Member[SingletonActor], bound: float) -> None:
    """Restarts a process that hangs, or that lives although a call failed; Ray restarts a dead one.

    Otherwise its object would go on beside the next one.
    """
    if isinstance(member.failure, StageTimeout):
        member.value.restart()
    else:
        await gather_or_cancel(*(end_built(rank, bound) for rank in member.value.ranks))


async def _raise_unless_built(remote: Remote, bound: float) -> None:
    """Raises if its process hangs, or was restarted: it then has no object."""
    if not await remote.is_built(bound):
        raise ProcessDied(remote.name, "its process died")


async def _raise_at_death(remote: Remote, bound: float) -> None:
    """Raises when its process ends, also if it did before."""
    await _raise_unless_built(remote, bound)
    raise await remote.end()
