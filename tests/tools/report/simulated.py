"""Run directories of the real pipeline in virtual time."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

from async_opd.accounting.journal import LEDGER, Journal
from async_opd.config.load import dump_config
from async_opd.config.run_config import RunConfig
from async_opd.files.run_format import write_run_format
from async_opd.observability.run_log import RunLog
from async_opd.observability.trace import TraceSink
from async_opd.tools.plan.setting import Setting
from tests.tools.plan import virtual
from tests.world.clock import run_virtually

EPOCH = 1_790_000_000.0


def record(
    folder: Path, setting: Setting, seed: int = 0, grader: tuple[float, int] | None = None
) -> Path:
    """Runs the setting and leaves its run directory. ``grader``: (seconds, processes a replica)."""
    changes = {"reward": {"grader": "exact"}, "loss": {"kind": "forward_kl"}} if grader else {}
    config = virtual.config_of(setting, changes)
    folder.mkdir(parents=True)
    write_run_format(folder)
    (folder / "config.yaml").write_text(dump_config(config))
    run_virtually(_run(folder, config, setting, seed, grader))
    return folder


async def _run(
    folder: Path, config: RunConfig, setting: Setting, seed: int, grader: tuple[float, int] | None
) -> None:
    loop = asyncio.get_running_loop()

    def clock() -> float:
        return EPOCH + loop.time()

    sinks: Any = [TraceSink(folder, clock)]
    with RunLog(config, folder, clock, sinks) as log, Journal(folder / LEDGER) as journal:
        _, pipeline = virtual.build(config, setting, seed, clock, log, journal, grader)
        log.message("starting Ray and the engines")
        await pipeline.run()
        log.finish("completed")
