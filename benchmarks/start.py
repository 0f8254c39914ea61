"""Seconds from `async_opd run` to the first rollout, and its parts, each alone on the machine.

    serving   async_opd run examples/quickstart.yaml ──► "everything is up", then it is interrupted
    imports   the driver's modules, in a new process
    ray       a local cluster, as a run starts it
    engines   the quickstart's three engines at the same time, without Ray

Each part is timed from a new process's start. ``cpu_s`` are seconds of all cores for the whole
start, processes of the engines included: over the number of cores they bound ``serving_s`` from
below. Medians of ``--repeats``.

``python -m benchmarks.start`` prints one JSON object last.
"""

from __future__ import annotations

import argparse
import asyncio
import importlib
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from threading import Timer

import psutil

QUICKSTART = Path(__file__).parents[1] / "examples" / "quickstart.yaml"
MODELS = QUICKSTART.parent / "quickstart" / "models"
SERVING = "everything is up"
BOUND_S = 600.0
UP = "up at "


def serving(folder: str) -> dict[str, float]:
    """A run until it serves. RuntimeError with its output if it ends before."""
    command = [sys.executable, "-m", "async_opd", "run", str(QUICKSTART), f"run_dir={folder}/run"]
    started, printed = time.monotonic(), []
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as run:
        assert run.stdout is not None
        late = Timer(BOUND_S, run.kill)  # which ends what is read
        late.start()
        for line in run.stdout:
            printed.append(line)
            if SERVING in line:
                break
        else:
            raise RuntimeError("the run ended before it served:\n" + "".join(printed))
        seconds = time.monotonic() - started
        spent = sum(cpu_seconds(one) for one in [run.pid, *descendants(run.pid)])
        run.send_signal(signal.SIGINT)
        run.stdout.read()
        run.wait(BOUND_S)
        late.cancel()
    return {"serving_s": seconds, "cpu_s": spent}


def descendants(pid: int) -> list[int]:
    """Processes below this one, those of Ray too."""
    return [child.pid for child in psutil.Process(pid).children(recursive=True)]


def cpu_seconds(pid: int) -> float:
    """Of a process and its children that have ended; 0 if it has."""
    try:
        return sum(psutil.Process(pid).cpu_times()[:4])
    except psutil.NoSuchProcess:
        return 0.0


def together(*parts: str) -> float:
    """Seconds until all parts, each in a new process, are up. RuntimeError if one ends before."""
    started = time.time()
    command = [sys.executable, "-m", "benchmarks.start", "--part"]
    running = [
        subprocess.Popen([*command, one], stdout=subprocess.PIPE, text=True) for one in parts
    ]
    late = Timer(BOUND_S, lambda: [process.kill() for process in running])
    late.start()
    printed = [process.communicate()[0] for process in running]
    late.cancel()
    lines = [line for text in printed for line in text.splitlines()]
    up = [line.removeprefix(UP) for line in lines if line.startswith(UP)]
    if len(up) < len(parts):
        raise RuntimeError(f"of {', '.join(parts)} not all were up: {printed}")
    return max(map(float, up)) - started


def report() -> None:
    """Prints when this process's part is up."""
    print(f"{UP}{time.time()}", flush=True)


def imports() -> None:
    """All that the driver imports."""
    for name in ("async_opd.run", "async_opd.training"):
        importlib.import_module(name)
    report()


def ray(folder: str) -> None:
    """A local cluster, up and then down."""
    from async_opd.cluster.session import ray_session
    from async_opd.config.load import load_config

    config = load_config(QUICKSTART, [f"run_dir={folder}"])

    async def session() -> None:
        async with ray_session(config, print):
            report()

    asyncio.run(session())


def engine(model: str) -> None:
    """An engine with the settings of the quickstart's rollouts, as an actor starts it."""
    from async_opd.config.sections.engine import EngineConfig
    from async_opd.models.engine_args import engine_env, engine_kwargs
    from async_opd.processes.forked_engine import forked_engine

    os.environ.update(engine_env("cpu"), ASYNC_OPD_ACTOR=model)
    from vllm import AsyncEngineArgs
    from vllm.v1.engine import utils
    from vllm.v1.engine.async_llm import AsyncLLM

    kwargs = engine_kwargs(
        EngineConfig(max_model_len=128),
        model=str(MODELS / model),
        device="cpu",
        tensor_parallel=1,
        seed=0,
        trust_remote_code=False,
    )
    with forked_engine(utils, on_cpu=True):
        made = AsyncLLM.from_engine_args(AsyncEngineArgs(**kwargs))
    report()
    made.shutdown()


def run_part(part: str) -> None:
    """One of ``imports``, ``ray``, and the names of the quickstart's models."""
    if part == "imports":
        imports()
    elif part == "ray":
        with tempfile.TemporaryDirectory() as folder:
            ray(folder)
    else:
        engine(part)


def measured() -> dict[str, float]:
    """All parts once."""
    with tempfile.TemporaryDirectory() as folder:
        whole = serving(folder)
    return {
        **whole,
        "imports_s": together("imports"),
        "ray_s": together("ray"),
        "engines_s": together("student", "teacher-sort", "teacher-reverse"),
    }


def main(arguments: Sequence[str] | None = None) -> None:
    """See the module."""
    made = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    made.add_argument("--repeats", type=int, default=3)
    made.add_argument("--part", help=argparse.SUPPRESS)
    options = made.parse_args(arguments)
    if options.part:
        run_part(options.part)
        return
    rounds = [measured() for _ in range(options.repeats)]
    medians = {key: statistics.median(one[key] for one in rounds) for key in rounds[0]}
    found = {key: round(value, 1) for key, value in medians.items()}
    print(json.dumps({**found, "cores": os.cpu_count(), "repeats": options.repeats}))


if __name__ == "__main__":
    main()
