"""Processes of environments and replicas die in the middle of episodes: none is lost or twice."""

from __future__ import annotations

import asyncio
import os
import signal
from collections import Counter
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from async_opd.core.environments import AssistantMessage
from async_opd.core.samples import Prompt
from async_opd.environments.pool import PROGRAM, Environments
from tests.environments.random_episodes import World, violations
from tests.models.turns.styles import STYLES
from tests.processes.test_signals import is_gone
from tests.world.environments import WORLD, call, spec_of

KILLS = 6
ADDS, HANGS, DIES = call("add", number=1), call("do", what="hang"), call("do", what="die")


class Killed(World):
    """Its environments are in processes that it kills or stops, and time is real."""

    bound_s, moment_s = 240.0, 0.05
    answers = (*[ADDS] * 60, AssistantMessage("it is 42"), HANGS, DIES)

    def __init__(self, folder: Path) -> None:
        super().__init__(1)
        self.tools, self.history, self.n, self.groups = True, "append", 2, 20
        self.slots, self.concurrency, self.faults, self.deaths = 4, 8, 0.0, 3
        self.longest, self.announced = 8000, folder / "announced"
        bounds = {"max_turns": 8, "max_tokens": None, "history": "append"}
        self.config = self.config.model_copy(update=bounds)
        self.models_of(STYLES["qwen2.5"], STYLES["llama"], folder / "models")
        self.sent = Counter[str]()

    def pool(self) -> Any:
        section = {"factory": f"{WORLD}:Announced", "kwargs": {"tell": str(self.announced)}}
        timeouts = {"step_s": 4, "reset_s": 60}
        made: Any = Environments(spec_of(**section, processes=2, timeouts=timeouts))
        made.opened = ()  # a process that is gone has none
        return made

    async def run(self) -> None:
        killing = asyncio.create_task(self._kill())
        await super().run()
        killing.cancel()

    def _prompt(self, number: int) -> Prompt:
        """The first prompt's environment dies at each try: its episodes end as dead letters."""
        prompt = super()._prompt(number)
        row = replace(prompt.row, fields={"then": "exit"} if number == 0 else {})
        return replace(prompt, row=row)

    @property
    def pids(self) -> list[int]:
        """The processes in which an environment has begun, the newest last."""
        lines = self.announced.read_text().splitlines() if self.announced.exists() else []
        return [*dict.fromkeys(int(line) for line in lines if line.isdigit())]

    async def _kill(self) -> None:
        while self.sent.total() < KILLS:
            await self.wait()
            sent = signal.SIGSTOP if self.sent.total() % 4 == 1 else signal.SIGKILL
            for pid in self.pids[::-1]:
                with suppress(OSError):
                    if self._sends(pid, sent):
                        await asyncio.sleep(1)
                        break

    def _sends(self, pid: int, sent: signal.Signals) -> bool:
        if PROGRAM not in Path(f"/proc/{pid}/cmdline").read_text():
            return False
        os.kill(pid, sent)
        self.sent[sent.name] += 1
        return True


@pytest.mark.slow
async def test_kills_lose_no_episode_and_leave_no_process(tmp_path: Path) -> None:
    world = Killed(tmp_path)
    await world.run()
    assert [*violations(world)] == []
    assert world.uids == world.outcomes.keys()
    kinds = Counter(type(one).__name__ for one in world.outcomes.values())
    assert kinds["Rollout"] > kinds["DeadLetter"] > 0
    assert min(world.sent["SIGKILL"], world.sent["SIGSTOP"]) > 0
    assert all(map(is_gone, world.pids))
