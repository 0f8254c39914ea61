"""A run directory as a run with known speeds would leave it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from async_opd.config.yaml_text import dump_yaml
from async_opd.files.run_format import write_run_format

BATCH, LENGTH, PROMPT = 32, 100, 20
CONFIG: dict[str, Any] = {
    "student": {"model": "student"},
    "teachers": {"a": {"model": "a", "engine": {"max_num_seqs": 16}}},
    "data": {"train": "prompts.jsonl", "eval": "prompts.jsonl"},
    "rollout": {"n": 2, "max_tokens": 1000, "engine": {"max_num_seqs": 16}},
    "train": {"steps": 60, "batch_size": BATCH},
    "async": {"sync_steps": 2},
}


def line(step: int) -> dict[str, float]:
    """One second: 32 rollouts at 0.01 + 0.001 n s a step, scored at 20,000 tokens/s."""
    running = (4.0, 8.0, 12.0, 15.0)[step % 4]
    request_s = BATCH * (LENGTH + 0.5) * (0.01 + 0.001 * running)
    batches = (2.0, 4.0, 8.0)[step % 3]
    tokens = float(BATCH * (LENGTH + PROMPT))
    synced = {"sync/trainer_wait_s": 0.05, "sync/stall_mean_s": 0.2} if step % 2 == 0 else {}
    return {
        "step": step,
        "time": 1000.0 + 5 + step,
        "perf/step_s": 1.0,
        "staleness/mean": 0.5,
        "staleness/max": 1.0,
        "rollout/request_s": request_s,
        "rollout/rollouts_per_s": float(BATCH),
        "rollout/busy_s": request_s / running + 0.1,
        "rollout/paused_s": 0.1,
        "teacher/a/busy_s": 0.02 * batches + tokens / 20_000,
        "teacher/a/batches_per_s": batches,
        "teacher/a/tokens_per_s": tokens,
        "teacher/a/samples_per_s": float(BATCH),
        "train/busy_s": 0.8,
        "train/wait_s": 0.1,
        "train/compute_s": 0.8,
        "train/tokens": tokens,
        "train/response_tokens": float(BATCH * LENGTH),
        "train/mean_response_tokens": float(LENGTH),
        "train/std_response_tokens": 80.0,
        **synced,
    }


def write_run(
    directory: Path, steps: int = 60, without: str = "", config: dict[str, Any] = CONFIG
) -> Path:
    """The directory, without one of the metrics if asked for."""
    directory.mkdir(exist_ok=True)
    write_run_format(directory)
    (directory / "config.yaml").write_text(dump_yaml(config), encoding="utf-8")
    lines = [line(step) for step in range(1, steps + 1)]
    evaluation: dict[str, Any] = {"step": 30, "time": 1036.0, "eval/seconds": 2.5}
    records = [{k: v for k, v in one.items() if k != without} for one in [*lines, evaluation]]
    text = "".join(json.dumps(record) + "\n" for record in records)
    (directory / "metrics.jsonl").write_text(text, encoding="utf-8")
    summary = {"status": "completed", "seconds": steps + 40.0}
    (directory / "summary.json").write_text(json.dumps(summary), encoding="utf-8")
    return directory
