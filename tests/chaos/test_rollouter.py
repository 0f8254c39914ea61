"""The rollouter's actor is killed in a run, in the middle of weight syncs too.

Its replicas, whose engines only take time, live on, also one that was rebuilt before, and every
sample is trained once. Ray shows each stage as a named actor, before the kills and after them.
"""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
import ray
from ray.util import list_named_actors

from async_opd.accounting.audit import Audit, audit
from async_opd.accounting.journal import LEDGER, Journal
from async_opd.cluster.actor_factory import Factory
from async_opd.cluster.launch import LaunchedStages, launch
from async_opd.config.sections.plan import RolloutPlan
from async_opd.files.run_format import write_run_format
from async_opd.observability.run_log import RunLog
from async_opd.pipeline import Pipeline
from async_opd.tools.plan.setting import Lengths
from benchmarks.pipeline import Prompts
from tests.cluster.simulated import FACTORIES, config

pytestmark = [pytest.mark.engine, pytest.mark.long]

STEPS, BATCH, KILLS = 140, 32, 3
SYNC_S = 0.3
"""Of each push; a step takes a tenth of it, so a push is nearly always under way."""


@dataclass
class Lines:
    """A sink that knows the last step and its messages."""

    name: str = "lines"
    step: int = 0
    lines: list[str] = field(default_factory=list)
    changed: asyncio.Event = field(default_factory=asyncio.Event)

    def start(self) -> None: ...
    def rewind(self) -> None: ...
    def waits(self, waits: Mapping[str, str]) -> None: ...
    def busy(self, pools: Mapping[str, Sequence[Any]]) -> None: ...
    def close(self, summary: Any) -> None: ...

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self.step = step
        self.changed.set()

    def message(self, text: str, level: str = "info") -> None:
        self.lines.append(text)
        self.changed.set()

    async def told(self, line: str, times: int = 1) -> None:
        """A line was logged so often."""
        await self._until(lambda: sum(line in one for one in self.lines) >= times)

    async def trained(self, step: int) -> None:
        """So many steps are trained."""
        await self._until(lambda: self.step >= step)

    async def _until(self, so: Callable[[], bool]) -> None:
        async with asyncio.timeout(120):
            while not so():
                self.changed.clear()
                await self.changed.wait()


@dataclass(frozen=True)
class Survived:
    """The files of the run; ``pids`` are the replicas' before the rollouter's kills and after them.

    ``kinds``: the class that Ray shows for each name of an actor, before all kills and after them.
    """

    audit: Audit
    lines: tuple[str, ...]
    pids: tuple[list[int], list[int]]
    kinds: tuple[dict[str, str], dict[str, str]]
    step: int


KINDS = {
    "queue": "MessageQueue",
    "rollouter": "Rollouter",
    "rollouter/replica/0": "StudentReplica",
    "rollouter/replica/1": "StudentReplica",
    "teacher_scorer": "TeacherScorer",
    "teacher_scorer/t/replica/0": "TeacherReplica",
    "teacher_scorer/t/replica/1": "TeacherReplica",
    "trainer/0": "Trainer",
}


def kinds() -> dict[str, str]:
    """The class of each actor of the run that lives and has a name."""
    shown = ray._private.state.actors().values()
    classes = {one["Name"]: one["ActorClassName"] for one in shown if one["State"] == "ALIVE"}
    return {name: classes[name] for name in list_named_actors()}


async def pids(stages: LaunchedStages) -> list[int]:
    replicas = stages.singletons.rollouter.replicas
    return [await replica.student.remote.pid(60) for replica in replicas]


async def kills(stages: LaunchedStages, lines: Lines) -> dict[str, tuple[Any, Any]]:
    """First a replica, which is rebuilt; then the rollouter, again and again.

    Returns ``pids`` and ``kinds`` of Survived.
    """
    await lines.trained(5)
    shown = kinds()
    os.kill((await pids(stages))[0], signal.SIGKILL)
    await lines.told("student/0 is rebuilt")
    before = await pids(stages)
    for kill in range(1, KILLS + 1):
        await lines.trained(lines.step + 3)
        os.kill(await stages.rollouter.remote.pid(60), signal.SIGKILL)
        await lines.told("rollouter is rebuilt", times=kill)
    await lines.trained(lines.step + 3)
    return {"pids": (before, await pids(stages)), "kinds": (shown, kinds())}


async def survive(run_dir: Path) -> Survived:
    sections = {
        "train": {"steps": STEPS, "batch_size": BATCH},
        "async": {"staleness_threshold": 1.0, "sync_steps": 2},
        "supervision": {"delay_s": 0.1},
    }
    run = config(run_dir, **sections)
    speed = (RolloutPlan(step_s=1e-3), 16, Lengths(16, 0.3, 64), SYNC_S)
    student = Factory("benchmarks.simulated.replicas:SimulatedStudent", speed)
    lines = Lines()
    with RunLog(run, run_dir, sinks=[lines]) as log, Journal(run_dir / LEDGER) as journal:
        factories = replace(FACTORIES, student=student)
        async with launch(
            run, device="cpu", eos_ids=(), factories=factories, notify=log.message
        ) as stages:
            killing = asyncio.create_task(kills(stages, lines))
            prompts: Any = Prompts()
            await Pipeline(run, stages, prompts, None, log, journal).run()
            found = await killing
        log.finish("completed")
    return Survived(audit(run_dir), tuple(lines.lines), step=lines.step, **found)


@pytest.fixture(scope="module")
def survived(tmp_path_factory: pytest.TempPathFactory) -> Survived:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", os.getcwd())  # for the simulated engines
        run_dir = tmp_path_factory.mktemp("runs") / "first"
        run_dir.mkdir()
        write_run_format(run_dir)
        return asyncio.run(survive(run_dir))


def test_the_run_completes_with_no_sample_lost_and_none_trained_twice(survived: Survived) -> None:
    found = survived.audit
    assert (found.lost, found.duplicated, found.in_flight) == ((), (), ())
    assert (survived.step, len(found.trained)) == (STEPS, STEPS * BATCH)


def test_the_rollouter_is_rebuilt_each_time(survived: Survived) -> None:
    assert sum("rollouter is ejected" in line for line in survived.lines) == KILLS
    assert sum("rollouter is rebuilt" in line for line in survived.lines) == KILLS


def test_its_replicas_live_on_even_one_that_it_has_rebuilt(survived: Survived) -> None:
    before, after = survived.pids
    assert before == after
    assert sum("student/" in line and "is ejected" in line for line in survived.lines) == 1


def test_ray_shows_every_stage_by_a_name_below_the_runs_and_what_it_is(survived: Survived) -> None:
    assert survived.kinds[0] == {f"first/{path}": kind for path, kind in KINDS.items()}


def test_a_member_that_is_rebuilt_has_the_name_of_the_one_before(survived: Survived) -> None:
    assert survived.kinds[1] == survived.kinds[0]
