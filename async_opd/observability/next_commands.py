"""The commands that come after a run, as lines to be pasted into a shell."""

from __future__ import annotations

import shlex
from pathlib import Path

from async_opd.observability.sinks import Summary


def resume_command(run_dir: Path) -> str:
    """Continues the run after its newest checkpoint, by the config in its directory."""
    config, folder = shlex.quote(f"{run_dir}/config.yaml"), shlex.quote(str(run_dir))
    return f"async_opd run {config} --run-dir {folder} --resume"


def next_commands(summary: Summary, given: bool = False) -> list[str]:
    """How a run that has not completed is continued; what the student of one that has is for.

    ``given``: the run directory may be somebody else's, whose config may name code. No command
    takes it as a config then.
    """
    run_dir = summary.run_dir
    if summary.status != "completed":
        return [] if given else [resume_command(run_dir)]
    config, folder = shlex.quote(f"{run_dir}/config.yaml"), shlex.quote(str(run_dir))
    evaluated = not given and any(key.startswith("eval/") for key in summary.metrics)
    return [
        f"async_opd report {folder}",
        *([f"async_opd eval {config} {folder} eval.n=4"] if evaluated else []),
        f"async_opd export {folder} {shlex.quote(f'{run_dir.name}-student')}",
    ]
