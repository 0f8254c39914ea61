"""A replica's answers to evaluation prompts, at a low priority beside its rollouts.

    prompts ──a slot each, of those that rollouts leave──► sample ──► answers, in order
                                              ▲               │ broken off by a drain
                                              └───────────────┘ begins again after it

A sync that keeps the requests in flight keeps these too. One that waits for the rollouts in flight
(``async.on_sync: finish``) does not wait for evaluations: they are broken off when no rollout is
left, and begin again with the new weights.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import NoReturn

from async_opd.core.errors import RolloutFault, StageError
from async_opd.core.samples import Prompt, Rollout
from async_opd.core.stages import SamplingSpec
from async_opd.core.uid import Uid, rollout_uid
from async_opd.environments.episode import Play, SampleTurn
from async_opd.waiting.deadline import gather_or_cancel, race
from rollouter.slots import Slots


class EvaluationWorker:
    """``sample`` makes one answer; ``slots`` bounds how many at the same time.

    With ``play`` an answer is an episode, of which ``sample`` makes a turn. One that cannot be
    played is an answer with its ``fault``, and the others go on. ``room`` is that of the rollouts'
    episodes: those of an evaluation that wait for it are in no rollout's way to an environment.
    """

    def __init__(
        self, slots: Slots, sample: SampleTurn, play: Play | None = None, room: Slots | None = None
    ) -> None:
        self._slots, self._room = slots, room or slots  # without episodes one and the same
        self._sample, self._play = sample, play
        self._broken_off = asyncio.Event()
        self._open = asyncio.Event()
        self._open.set()
        self._stopped = asyncio.Event()

    async def generate(self, prompts: Sequence[Prompt], sampling: SamplingSpec) -> list[Rollout]:
        """``sampling.n`` answers to each prompt, in order. StageError if it is stopped before."""
        answers = gather_or_cancel(
            *(
                self._answer(prompt, rollout_uid(prompt.uid, index), sampling)
                for prompt in prompts
                for index in range(sampling.n)
            )
        )
        return await race(answers, _stop_error(self._stopped))

    async def _answer(self, prompt: Prompt, uid: Uid, sampling: SamplingSpec) -> Rollout:
        if self._play is not None:
            slot = self._slots.evaluation
            try:
                async with self._room.evaluation():
                    made = await self._play(prompt, uid, sampling, self._turn, lambda _: slot())
            except RolloutFault as fault:
                made = Rollout.unanswered(uid, prompt, fault)
            return made.without_row
        async with self._slots.evaluation():
            return await self._turn(prompt, uid, sampling)

    async def _turn(
        self, prompt: Prompt, uid: Uid, sampling: SamplingSpec, turn: int = 0
    ) -> Rollout:
        while True:
            await self._open.wait()
            answer = await race(self._sample(prompt, uid, sampling, turn), self._ended())
            if answer is not None:
                return answer

    async def _ended(self) -> None:
        await self._broken_off.wait()

    def stop(self) -> None:
        """Ends all answers that were asked for until now: no caller waits for them any more."""
        self._stopped.set()
        self._stopped = asyncio.Event()

    def break_off(self) -> None:
        """Ends the answers in flight; they begin again after ``go_on``."""
        self._open.clear()
        self._broken_off.set()

    def go_on(self) -> None:
        """Lets answers begin."""
        self._broken_off.clear()
        self._open.set()


async def _stop_error(stopped: asyncio.Event) -> NoReturn:
    await stopped.wait()
    raise StageError("student", "the replica was stopped before its evaluation ended")
