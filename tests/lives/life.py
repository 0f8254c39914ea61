"""One life of a run: processes that die, are interrupted and go on, until all steps are trained.

    a seed ──► settings and events ──► processes, one after the other, in one folder ──► completed
                                        │ each is the real ``run``, over the stages of ``stages``
                                        └── kill -9: the folder as it is at that turn stays

The event loop's clock jumps to the next timer when nothing is left to do: no life takes longer for
a timeout, and a run that hangs ends by its own bounds, at once. Threads work within the loop.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import selectors
import shutil
import threading
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from contextlib import (
    AbstractContextManager,
    ExitStack,
    asynccontextmanager,
    contextmanager,
    suppress,
)
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

from async_opd import job as jobs
from async_opd import run as runs
from async_opd import training as trainings
from async_opd.checkpoint import mirror as mirrors
from async_opd.checkpoint import run_copies
from async_opd.checks.preflight import Inputs
from async_opd.config.run_config import RunConfig
from async_opd.core.samples import Rollout
from async_opd.files.remote import RemoteFile
from async_opd.grading.evaluation_files import EvaluationFiles
from async_opd.observability import run_log
from async_opd.observability.sinks import Sink
from async_opd.prepare import Prepared
from tests.lives.oracle import violations
from tests.lives.stages import Cluster, Shape
from tests.test_rewind import from_cursor
from tests.world.clock import Pace, PacedReads
from tests.world.faults import Faults
from tests.world.prompts import TEACHERS, FakePrompts
from tests.world.run import evaluation

MOST_TURNS = 40_000
"""Turns of the event loop after which a process hangs."""


class Killed(BaseException):
    """The process is gone: nothing after this line runs."""


class HangsError(Exception):
    """The process waits for what never comes."""


class _Clock(selectors.DefaultSelector):
    """Calls ``turn`` in each turn of the loop. Time passes only while nothing is ready."""

    def __init__(self, turn: Callable[[], bool]) -> None:
        super().__init__()
        self.now, self._turn = 1000.0, turn

    def select(self, timeout: float | None = None) -> Any:
        found = super().select(0)
        if self._turn() or found or timeout == 0:
            return found
        if timeout is None:
            raise HangsError("nothing is ready, and no timer will ever be")
        self.now += timeout + 1e-6
        return found


class _Loop(asyncio.SelectorEventLoop):
    def __init__(self, turn: Callable[[], bool]) -> None:
        self.clock = _Clock(turn)
        super().__init__(self.clock)

    def time(self) -> float:
        return self.clock.now


@dataclass
class Uploads:
    """The mirror's thread: it goes on, to its next operation on the store, when ``step`` is called.

    While ``away`` every operation fails.
    """

    work: Callable[[list[None]], None]
    away: Callable[[], bool]
    waiting: int = 0
    killed: bool = False
    _go: threading.Semaphore = field(default_factory=lambda: threading.Semaphore(0))
    _back: threading.Semaphore = field(default_factory=lambda: threading.Semaphore(0))
    _thread: threading.Thread | None = None

    def put(self, item: None) -> bool:
        self.waiting += 1
        return True

    def step(self) -> bool:
        if not self.waiting:
            return False
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, daemon=True)
            self._thread.start()
        self._go.release()
        self._back.acquire()
        return True

    def close(self, timeout_s: float) -> bool:
        while self.waiting and not self.killed:
            self.step()
        return True

    def kill(self) -> None:
        self.killed = True
        if self._thread is not None:
            self._go.release()
            self._thread.join()

    def operation(self, real: Callable[..., Any], *args: Any, **named: Any) -> Any:
        if threading.current_thread() is self._thread:
            self._pass_on()
            if self.away():
                raise OSError("the store is away")
        return real(*args, **named)

    def _pass_on(self) -> None:
        self._back.release()
        self._go.acquire()
        if self.killed:
            raise Killed

    def _run(self) -> None:
        with suppress(Killed):
            self._go.acquire()
            while not self.killed:
                items, self.waiting = self.waiting, 0
                if items:
                    self.waiting = 1
                    self.work([None] * items)
                    self.waiting -= 1
                self._pass_on()


@dataclass(frozen=True)
class Process:
    """What happens to one process: ``end`` after ``turns``, and before that ``events``.

    An event is the turns since the one before, and its name. ``s``, ``ranks`` and ``lag`` are the
    settings that a resume may change. ``machine``: it begins in an empty run directory.
    """

    end: str
    turns: int
    events: tuple[tuple[int, str], ...]
    s: float
    ranks: int
    lag: int | None
    machine: bool = False
    away: tuple[int, int] = (0, 0)
    """From which turn to which the mirror's store does not answer."""


@dataclass(frozen=True)
class Life:
    """All that a seed decides."""

    seed: int
    settings: dict[str, Any]
    shape: Shape
    images: bool
    processes: tuple[Process, ...]

    @classmethod
    def of(cls, seed: int) -> Life:
        """The life of a seed."""
        chance = random.Random(seed)
        some = chance.choice
        n, groups, k, steps = some([1, 2, 2, 4]), some([False, False, True]), some([1, 1, 2, 3]), 0
        n = max(n, 2) if groups else n
        steps = chance.randint(3, 12)
        back, mirror = some([(False, False), (True, False), (False, True)])
        every = some([0, 1, 1, 2])
        bad = {chance.randint(2, steps): some([0.5, 0.25])} if back else {}
        faults = Faults(
            frozenset(chance.sample(range(12), some([0, 0, 2]))),
            frozenset(
                f"p{chance.randint(0, 12)}/{chance.randint(0, 3)}" for _ in range(some([0, 0, 3]))
            ),
            some([0.0, 0.0, 0.1]),
        )
        settings: dict[str, Any] = {
            "rollout": {"n": n, "replicas": chance.randint(1, 3)},
            "train": {"steps": steps, "batch_size": 4},
            "async": {"sync_steps": k},
            "eval": {"every": every, "teachers": False, "replicas": some([0, 0, 1, 2])},
            "checkpoint": {"every": some([1, 1, 2, 3]), "keep": some([1, 2, 3])},
            "guardrail": {"mode": "roll_back" if back else "off", "window": some([1, 3])},
            "reward": {} if groups else None,
        }
        settings["guardrail"]["max_truncated_share"] = 0.3
        if every and some([False, True]):
            settings["checkpoint"]["keep_best"] = "eval/*/accuracy"
        apart = random.Random(f"steps {seed}")  # other lives stay as they were
        if every and apart.random() < 0.3:
            steps = apart.randint(1, 4) * (k if "keep_best" in settings["checkpoint"] else 1)
            settings["eval"] = {**settings["eval"], "every": None, "every_steps": steps}
        if apart.random() < 0.3:
            settings["checkpoint"] |= {"every": None, "every_steps": apart.randint(1, 4)}
        if mirror:
            settings["checkpoint"]["mirror"] = "MIRROR"
        processes = [cls._process(chance, mirror) for _ in range(chance.randint(0, 4))]
        processes.append(replace(cls._process(chance, mirror), end="", events=(), away=(0, 0)))
        return cls(seed, settings, Shape(faults, bad), some([False, True]), tuple(processes))

    @staticmethod
    def _process(chance: random.Random, mirror: bool) -> Process:
        some = chance.choice
        names = ["queue", "copies", "trainer"]
        events = [(chance.randint(0, 500), some(names)) for _ in range(some([0, 0, 1, 2, 3]))]
        away = some([0, 0, chance.randint(0, 1500)]) if mirror else 0
        return Process(
            end=some(["kill", "kill", "signal", ""]),
            turns=chance.randint(0, some([300, 2500])),
            events=tuple(events),
            s=some([0.0, 0.5, 1.0, 4.0]),
            ranks=some([1, 1, 2]),
            lag=some([None, None, 0, 1]),
            machine=mirror and some([False, False, True]),
            away=(away // 2, away),
        )

    def __str__(self) -> str:
        lines = [f"seed {self.seed}: {self.settings}, images {self.images}, {self.shape}"]
        return "\n  ".join([*lines, *map(str, self.processes)])

    def live(self, folder: Path) -> list[str]:
        """Lives in ``folder``, in ``run`` and ``bucket``. What the oracle finds, then it ends."""
        run_dir = folder / "run"
        for number, process in enumerate(self.processes):
            if process.machine and number:
                shutil.rmtree(run_dir, ignore_errors=True)
            folder.mkdir(exist_ok=True)
            living = Living(self, process, number, folder)
            end = living.run(resume=number > 0)
            found = [living.failure] if living.failure else []
            if (run_dir / "run.log").exists():
                found += violations(run_dir, folder / "bucket", end == runs.COMPLETED)
            if end is not None:
                found += self._ended(run_dir, end)
            if found or end == runs.COMPLETED:
                return [f"process {number}: {one}" for one in found]
        return ["the last process has not completed the run"]

    @staticmethod
    def _ended(run_dir: Path, code: int) -> list[str]:
        """The summary has the status of the exit code; nothing but a death has failed."""
        statuses = {0: "completed", 1: "failed", 130: "interrupted"}
        summary = json.loads((run_dir / "summary.json").read_text())
        if summary["status"] != statuses[code]:
            return [f"exit code {code}, and the summary says {summary['status']}"]
        mended = "trainer: its process died", "the store is away"
        if code == 1 and not any(cause in summary["error"] for cause in mended):
            return [f"it has failed: {summary['error']}"]
        return []


class Living:
    """One process of a life."""

    def __init__(self, life: Life, process: Process, number: int, folder: Path) -> None:
        self.life, self.process, self.folder = life, process, folder
        self.number = number
        self.turn, self.over = 0, False
        self.events, at = list[tuple[int, str]](), 0
        for gap, name in process.events:
            at += gap
            self.events.append((at, name))
        self.failure = ""
        self.uploads: list[Uploads] = []
        self.work: asyncio.Task[Any] | None = None
        self.cluster: Cluster | None = None

    def run(self, resume: bool) -> int | None:
        """The exit code; None if the process was killed."""
        with self._faked():
            try:
                code = runs.run(Prepared(self.config, Inputs(), "cpu"), resume)
            except Killed:
                code = None
            except Exception as error:
                code, self.failure = None, f"{type(error).__name__}: {error}"
            finally:
                for one in self.uploads:
                    one.kill()
        if code is None and not self.failure:
            shutil.rmtree(self.folder)
            self._kept.rename(self.folder)
        return code

    @property
    def config(self) -> RunConfig:
        """The config of this process."""
        process, settings = self.process, self.life.settings
        checkpoint = dict(settings["checkpoint"])
        if "mirror" in checkpoint:
            checkpoint["mirror"] = f"file://{self.folder}/bucket"
        lag = {} if process.lag is None else {"max_version_lag": process.lag}
        every = {
            "run_dir": str(self.folder / "run"),
            "student": {"model": "student"},
            "teachers": {name: {"model": name, "max_dead_letter_share": 1.0} for name in TEACHERS},
            "data": {"train": "prompts.jsonl", "eval": "eval.jsonl"},
            "log": {"console": "off", "wandb": "off", "pools_every_s": 0},
            "timeouts": {"stall_s": 30},
            **settings,
            "train": {**settings["train"], "ranks": process.ranks},
            "async": {**settings["async"], "staleness_threshold": process.s, **lag},
            "checkpoint": checkpoint,
        }
        return RunConfig.model_validate(every)

    # ── what is faked ──────────────────────────────────────────────────────────────────────────

    @contextmanager
    def _faked(self) -> Iterator[None]:
        """The real ``run`` on the stages of ``stages``, in this thread."""
        text: Any = SimpleNamespace(encode=None, response_ends=tuple)
        text.of_teacher = lambda *_: text
        nothing = type("Nothing", (Sink,), {"name": "nothing", "__init__": lambda *_, **__: None})
        fakes: list[AbstractContextManager[Any]] = [
            patch.object(runs, "launch", self._launch),
            patch.object(runs, "Text", SimpleNamespace(of=lambda config: text)),
            patch.object(runs, "run_to_end", self._drive),
            patch.object(runs, "SignalHandler", self._signals),
            patch.object(jobs, "LiveFile", nothing),
            patch.object(jobs, "add_origin", lambda *_: None),
            patch.object(run_log, "TraceSink", nothing),
            patch.object(trainings, "state_s", lambda config: 60.0),
            patch.object(mirrors, "state_s", lambda config: 60.0),
            patch.object(mirrors, "BackgroundWorker", self._uploads),
            patch.object(run_copies, "each_of", lambda work, items, at_once: [*map(work, items)]),
            patch.object(trainings, "training_prompts", self._prompts),
            patch.object(trainings, "reading_of", lambda job: PacedReads(Pace(self.life.seed))),
            patch.object(trainings, "evaluation_of", self._evaluation),
            patch.object(asyncio, "to_thread", inline),
            patch.object(os, "fsync", lambda handle: None),
            *(
                patch.object(RemoteFile, name, self._operation(getattr(RemoteFile, name)))
                for name in ("open", "names", "remove")
            ),
        ]
        with ExitStack() as stack:
            for one in fakes:
                stack.enter_context(one)
            yield

    def _operation(self, real: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **named: Any) -> Any:
            if not self.uploads:
                return real(*args, **named)
            return self.uploads[-1].operation(real, *args, **named)

        return call

    def _uploads(self, name: str, work: Callable[[list[None]], None], most: int) -> Uploads:
        first, last = self.process.away
        self.uploads.append(Uploads(work, lambda: first <= self.turn < last))
        return self.uploads[-1]

    def _signals(self, work: asyncio.Task[Any], *_: Any) -> Any:
        self.work = work
        return SimpleNamespace(over=lambda: None, work_ended=lambda: work)

    def _prompts(self, job: Any, text: object, readers: object) -> FakePrompts:
        prompts = from_cursor(self.life.shape.faults, job, text, readers)
        prompts.images = self.life.images
        return prompts

    def _evaluation(self, config: RunConfig, rows: Any, text: Any, folder: Path, *_: Any) -> Any:
        pace = Pace(self.life.seed + self.number)

        async def grade(rollout: Rollout) -> float:
            await pace.wait()
            return -float(rollout.rollout_logprobs[0])

        prompts = FakePrompts(images=self.life.images).prompts(3)
        files = EvaluationFiles(folder, 1 << 20, 1 << 24, lambda ids: "")
        return replace(evaluation(grade), prompts=prompts, record=files.write)

    @asynccontextmanager
    async def _launch(
        self, config: RunConfig, notify: Callable[[str], None], **_: Any
    ) -> AsyncIterator[Cluster]:
        notify(
            f"life: the staleness threshold is {self.process.s}"
        )  # config.yaml has the last one only
        seed = 1000 * self.life.seed + 100 * self.number
        self.cluster = Cluster(config, self.life.shape, seed)
        try:
            yield self.cluster
        finally:
            self.cluster.close()

    # ── the event loop ─────────────────────────────────────────────────────────────────────────

    def _drive(self, main: Coroutine[Any, Any, int], new_loop: object) -> int:
        loop = _Loop(self._turn)
        asyncio.set_event_loop(loop)
        self.main = loop.create_task(main)
        try:
            return loop.run_until_complete(self.main)
        finally:
            self.over = True
            with suppress(HangsError):
                every = asyncio.all_tasks(loop)
                for task in every:
                    task.cancel()
                loop.run_until_complete(asyncio.gather(*every, return_exceptions=True))
            asyncio.set_event_loop(None)
            loop.close()

    def _turn(self) -> bool:
        """What happens in a turn of the event loop; whether anything more will without time."""
        self.turn += 1
        if self.over or self.cluster is None:
            return False
        if self.turn > MOST_TURNS:
            raise HangsError(f"it has not ended after {MOST_TURNS} turns of the event loop")
        while self.events and self.turn >= self.events[0][0]:
            self._strike(self.events.pop(0)[1])
        if self.turn >= self.process.turns and self.process.end == "kill":
            self._kill()
        if self.turn >= self.process.turns and self.process.end == "signal" and self.work:
            self.work.cancel()
            self.work = None
        return bool(self.uploads and self.turn % 3 == 0 and self.uploads[-1].step())

    def _strike(self, name: str) -> None:
        assert self.cluster is not None
        if name == "trainer":
            self.cluster.die()
        elif name == "queue":
            self.cluster.queue.die()
        else:
            self.cluster.queue.reissue.set()

    @property
    def _kept(self) -> Path:
        return self.folder.with_name(f"{self.folder.name}.killed")

    def _kill(self) -> None:
        """Keeps the disk as it is now; later writes of the process are thrown away."""
        shutil.copytree(self.folder, self._kept, symlinks=True)
        for one in self.uploads:
            one.kill()
        if self.cluster is not None:
            self.cluster.close()
        raise Killed


async def inline(work: Callable[..., Any], *args: Any, **named: Any) -> Any:
    """``asyncio.to_thread`` without a thread."""
    await asyncio.sleep(0)
    return work(*args, **named)
