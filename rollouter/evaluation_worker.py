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
from collections.abc import Awaitable, Callable, Sequence
from typing import NoReturn

from async_opd.core.errors import StageError
from async_opd.core.samples import Prompt, Rollout
from async_opd.core.stages import SamplingSpec
from async_opd.core.uid import Uid, rollout_uid
from async_opd.waiting.deadline import gather_or_cancel, race
from rollouter.slots import Slots

Sample = Callable[[Prompt, Uid, SamplingSpec], Awaitable[Rollout]]


class EvaluationWorker:
    """``sample`` makes one answer; ``slots`` bounds how many at the same time."""

    def __init__(self, slots: Slots, sample: Sample) -> None:
        self._slots = slots
        self._sample = sample
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
        async with self._slots.evaluation():
            while True:
                await self._open.wait()
                answer = await race(self._sample(prompt, uid, sampling), self._ended())
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
