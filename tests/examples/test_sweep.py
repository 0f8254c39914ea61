"""examples/sweep.sh: one run for each pair, those that are complete are not made again."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

SWEEP = Path(__file__).parents[2] / "examples" / "sweep.sh"
RUN = """#!/usr/bin/env bash
echo "$WANDB_RUN_GROUP $*" >> {calls}
[[ $1 != run || $* != *{fails}* ]] || exit 1
while [[ $# -gt 1 ]]; do [[ $1 = --run-dir ]] && dir=$2; shift; done
[[ -n ${{dir:-}} ]] || exit 0
mkdir -p "$dir" && echo '{{"status": "completed"}}' > "$dir/summary.json"
"""


def sweep(folder: Path, fails: str = "nothing", steps: int = 8) -> tuple[int, list[str]]:
    """The exit code, and the calls of ``async_opd``, which a script takes the place of."""
    command, calls = folder / "async_opd", folder / "calls"
    command.write_text(RUN.format(calls=calls, fails=fails))
    command.chmod(0o755)
    calls.write_text("")
    done = subprocess.run(
        [str(SWEEP), "my.yaml", f"train.steps={steps}"],
        cwd=folder,
        env={"PATH": f"{folder}:{os.environ['PATH']}", "THRESHOLDS": "0 1", "SYNC_STEPS": "2"},
        timeout=60,
        check=False,
    )
    return done.returncode, calls.read_text().splitlines()


@pytest.fixture
def pair() -> list[str]:
    return [
        f"sweep-my run my.yaml --staleness-threshold {threshold} --sync-steps 2 "
        f"--run-dir runs/sweep-my/threshold-{threshold}-sync-2 --resume train.steps=8"
        for threshold in (0, 1)
    ]


def test_each_pair_is_a_run_of_one_group_and_all_are_compared(
    tmp_path: Path, pair: list[str]
) -> None:
    folders = "runs/sweep-my/threshold-0-sync-2 runs/sweep-my/threshold-1-sync-2"
    compare = f"sweep-my compare {folders} --out runs/sweep-my/compare.html"
    assert sweep(tmp_path) == (0, [*pair, compare])


def test_a_failed_run_ends_the_sweep_which_continues_with_it(
    tmp_path: Path, pair: list[str]
) -> None:
    assert sweep(tmp_path, fails="threshold-1") == (1, pair)
    code, calls = sweep(tmp_path)
    assert (code, calls[0]) == (0, pair[1])


def test_a_sweep_of_other_arguments_is_refused(tmp_path: Path) -> None:
    sweep(tmp_path)
    assert sweep(tmp_path, steps=9) == (2, [])
