"""How far it is through the library, counted by an error that is raised at the end of the way.

    frames   the driver's snapshot of the weights ──► the copy, in the trainer's process
    hops     an engine's process ends ──► the exit code of the run

    python -m benchmarks.walks [--out DIR]

Each is a real run of the quickstart (a minute of two cores). The error counts the functions of ours
that it passes, in every process, and the one that it replaces; functions of libraries do not count.
Prints one JSON line last.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any, NoReturn

import psutil

from async_opd.core.errors import ProcessDied, first_cause

ROOT = Path(__file__).parents[1]
PACKAGES = tuple(str(ROOT / name) for name in ("async_opd", "rollouter", "teachers", "trainer"))
CONFIG = (
    *("train.steps=4", "eval.every=0", "eval.before=false", "eval.teachers=false"),
    *("supervision.max_restarts=0", "sync.verify_every=0", "log.wandb=off", "log.console=plain"),
)
BOUND_S = 600.0
SERVED_S = 3.0
"""Seconds of work before the engine is killed."""


class Counted(ProcessDied):
    """An error that remembers the functions which it has passed in other processes."""

    def __init__(
        self, stage: str, cause: str, remedy: str = "", passed: tuple[str, ...] = ()
    ) -> None:
        super().__init__(stage, cause, remedy)
        self.passed = passed

    def __reduce__(self) -> tuple[Any, ...]:
        return Counted, (self.stage, self.cause, self.remedy, self.way())

    def way(self) -> tuple[str, ...]:
        """The functions of ours that it has passed, those of earlier processes first."""
        return (*self.passed, *reversed(list(_ours(self.__traceback__))))


def _ours(at: TracebackType | None) -> Iterator[str]:
    while at is not None:
        code = at.tb_frame.f_code
        if code.co_filename.startswith(PACKAGES):
            yield f"{Path(code.co_filename).relative_to(ROOT)}:{code.co_qualname}"
        at = at.tb_next


def build_trainer(*given: Any) -> Any:
    """The real trainer, whose copy of the first new weights fails."""
    from async_opd.cluster.trainer_actor import build_trainer as real
    from trainer.offload import HostBuffers

    def copy(self: Any, tensor: Any) -> NoReturn:
        raise Counted("trainer", "counted", passed=("trainer/offload.py:HostBuffers.copy",))

    HostBuffers.copy = copy  # type: ignore[method-assign]
    return real(*given)


def build_student(*given: Any) -> Any:
    """A real replica whose engine is killed while it works."""
    from async_opd.processes.engine_workers import ExitWatch
    from rollouter.replica import StudentReplica

    async def death(self: Any) -> NoReturn:
        await self._ended.wait()
        own = ("async_opd/processes/engine_workers.py:ExitWatch._death",)
        raise Counted(self._name, "its engine's process has ended", passed=own)

    class Killed(StudentReplica):
        async def run(self) -> None:
            for child in psutil.Process().children(recursive=True):
                if "EngineCore" in f"{child.name()} {child.cmdline()}":
                    asyncio.get_running_loop().call_later(SERVED_S, child.kill)
            await super().run()

    ExitWatch._death = death  # type: ignore[method-assign]
    return Killed(*given)


def driver(kind: str, found: Path, arguments: list[str]) -> int:
    """The command line with a part that fails; the way of the error is written to a file."""
    import async_opd.run as run_module
    from async_opd.cli import main as command_line
    from async_opd.cluster.actor_factory import Factories, Factory
    from async_opd.cluster.launch import launch
    from async_opd.cluster.rollouter_replicas import RollouterActor

    if kind == "frames":
        factories = Factories(trainer=Factory("benchmarks.walks:build_trainer"))
        snapshot = RollouterActor.snapshot

        async def counted(self: Any, *args: Any) -> None:
            try:
                await snapshot(self, *args)
            except Counted as error:
                await asyncio.to_thread(found.write_text, json.dumps(error.way()))
                raise

        RollouterActor.snapshot = counted  # type: ignore[method-assign]
    else:
        factories = Factories(student=Factory("benchmarks.walks:build_student"))
        status = run_module._exit_status

        def exit_status(error: BaseException, run_dir: Path) -> Any:
            if isinstance(cause := first_cause(error), Counted):
                around = [f"{frame.filename}:{frame.name}" for frame in _stack()]
                found.write_text(json.dumps([*cause.way(), *around]))
            return status(error, run_dir)

        run_module._exit_status = exit_status
    run_module.launch = partial(launch, factories=factories)  # type: ignore[assignment]
    return command_line(arguments)


def _stack() -> Iterator[Any]:
    """The callers that have yet to return the exit code: they are on no traceback."""
    for frame in traceback.extract_stack():
        if frame.filename.startswith(PACKAGES) and frame.name != "_run":
            yield frame


def walked(kind: str, out: Path) -> list[str]:
    """The functions on a way. RuntimeError if the run did not come to its end."""
    found = out / f"{kind}.json"
    example = ROOT / "examples" / "quickstart.yaml"
    command = [sys.executable, "-m", "benchmarks.walks", "--drive", kind, str(found)]
    command += ["run", str(example), "--run-dir", str(out / kind), *CONFIG]
    done = subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, timeout=BOUND_S, check=False
    )
    if not found.exists():
        raise RuntimeError(f"the run counted nothing:\n{done.stdout}{done.stderr}")
    way: list[str] = json.loads(found.read_text())
    print(f"{kind}: {len(way)}", *way, sep="\n    ", flush=True)
    return way


def counts(out: Path) -> dict[str, int]:
    """``frames`` and ``hops``; the runs' directories are below ``out``."""
    return {kind: len(walked(kind, out)) for kind in ("frames", "hops")}


def main() -> int:
    """See the module's docstring."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path)
    parser.add_argument("--drive", nargs=argparse.REMAINDER)
    given = parser.parse_args()
    if given.drive:
        kind, found, *arguments = given.drive
        return driver(kind, Path(found), arguments)
    out = given.out or Path(tempfile.mkdtemp(prefix="walks"))
    out.mkdir(parents=True, exist_ok=True)
    print(json.dumps(counts(out)))
    return 0


if __name__ == "__main__":
    from benchmarks import walks  # the error's class is this module's in all processes

    sys.exit(walks.main())
