"""``--resume``: the newest checkpoint is checked against the config, files are cut to its step.

checkpoints/ ──newest valid──► config compared ──► metrics, ledger, dead letters cut to its step
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from async_opd.accounting.run_state import Cut
from async_opd.config.keys import drop_removed
from async_opd.config.run_config import RunConfig
from async_opd.core.errors import ConfigError, Problem
from async_opd.core.nesting import leaves, too_deep
from async_opd.core.row import Row
from async_opd.files.foreign import foreign
from async_opd.files.kept_steps import forget_steps
from async_opd.files.lines import MetricsRow, metrics_rows, whole_lines
from async_opd.files.safe_open import regular_file, write_atomically
from async_opd.grading.evaluation_files import forget_others
from async_opd.microscope import forget_after
from async_opd.observability.run_log import DEAD_LETTERS, METRICS

MAY_CHANGE = (
    *(
        "name",
        "run_dir",
        "plan",
        "plan.*",
        "report.*",
        "log.*",
        "eval.*",
        "data.eval",
        "data.image_cache_mib",
        "guardrail.*",
    ),
    "grading.*",
    *("cluster.*", "queue.*", "sync.*", "timeouts.*", "shutdown.*", "checkpoint.*"),
    *("rollout.replicas", "rollout.replicas.*", "teachers.*.replicas.*"),
    *("rollout.tensor_parallel", "rollout.concurrency", "rollout.engine.*"),
    *("teachers.*.replicas", "teachers.*.tensor_parallel", "teachers.*.engine.*"),
    *("teachers.*.urls", "teachers.*.api_key_env", "teachers.*.concurrency"),
    *("teachers.*.placement", "teachers.*.with"),
    *("teachers.*.health.*", "teachers.*.max_dead_letter_share", "supervision.*"),
    "teachers.*.max_bias",
    *("train.ranks", "train.context_parallel", "train.replicate"),
    *("train.threads", "train.tokens_per_micro_batch"),
    *("train.export_dtype", "train.gradient_checkpointing", "train.attention", "train.peak_tflops"),
    *("train.reduce_gradients", "train.offload", "train.compile"),
    *("async.staleness_threshold", "async.on_sync", "async.max_version_lag", "async.on_stale"),
)
"""Keys of speed, placement and supervision. All other keys define what is learned."""
IDENTITY = "identity.json"
"""The identity of the run of a directory, which also one without a checkpoint has."""


def identity(config: RunConfig, train: Sequence[Sequence[Row]]) -> str:
    """The config and a digest of the training data, with which a resumed run is compared.

    Of a streamed source the digest has the rows that were checked (``Inputs.checked``).
    """
    tree = config.model_dump(mode="json", by_alias=True)
    return json.dumps({"config": tree, "data": digest_of(train)})


def digest_of(sources: Sequence[Sequence[Row]]) -> str:
    """SHA-256 of all rows' prompts, which name images by their own SHA-256, and answers."""
    digest = hashlib.sha256()
    for rows in sources:
        for row in rows:
            digest.update(repr((row.uid, row.data_source, row.prompt, row.answer)).encode())
    return digest.hexdigest()


def refuse_changes(before: str | bytes, now: str) -> None:
    """ConfigError with every key that differs between two identities and may not."""
    new = json.loads(now)
    try:
        old = json.loads(before)
        if too_deep(old):
            raise ValueError("values inside of values")
        data = old["data"]
        drop_removed(old["config"], all_values=True)
        known = RunConfig.model_validate(old["config"]).model_dump(mode="json", by_alias=True)
    except ValidationError as error:
        message = f"its config is not one of this version: {error.error_count()} faults"
        remedy = "resume with the version that wrote it"
        raise ConfigError([Problem("checkpoint", "", message, remedy)]) from None
    except (ValueError, LookupError, TypeError, RecursionError):
        message, remedy = (
            "its record of config and data was changed or damaged",
            "take another run_dir",
        )
        raise ConfigError([Problem("checkpoint", "", message, remedy)]) from None
    remedy = "restore it, or start another run; docs/reliability.md lists the keys that may change"
    problems = [
        Problem("--resume", key, f"the run began with {was!r}, now it is {is_!r}", remedy)
        for key, was, is_ in changed_keys(known, new["config"])
    ]
    if not problems and data != new["data"]:
        message = "the files hold other rows, or other images, than those the run began with"
        problems = [Problem("--resume", "data.train", message, "restore the files")]
    if problems:
        raise ConfigError(problems)


def refuse_impossible(cut: Cut, config: RunConfig) -> None:
    """ConfigError with every count of a checkpoint that its run cannot have reached."""
    # Every prompt that was taken, and every sample that counts against the budget, has rollouts in
    # flight, trained or dead-lettered. A run resumed from larger counts would skip prompts for
    # hours.
    ledger, version = cut.ledger, config.version_after(cut.step)
    rollouts = ledger.trained + len(ledger.in_flight) + len(ledger.dead_lettered)
    bounds = {
        "step": (cut.step, 0, config.train.steps),
        "version": (cut.version, version, version),
        "ledger.trained": (ledger.trained, 0, cut.step * config.train.batch_size),
        "cursor": (cut.cursor, 0, rollouts),
        "admitted": (cut.admitted, 0, rollouts),
        **{f"files.{name}": (size, 0, None) for name, size in cut.files.items()},
    }
    problems = [
        Problem(
            "checkpoint",
            key,
            f"found {found}, which a run with {rollouts} rollouts at step {cut.step} cannot have",
            f"its cut.json was changed: remove step_{cut.step}, --resume takes the one before",
        )
        for key, (found, low, high) in bounds.items()
        if found < low or (high is not None and found > high)
    ]
    if problems:
        raise ConfigError(problems)


def cut_files(run_dir: Path, cut: Cut | None) -> dict[str, float]:
    """Removes lines of steps after the checkpoint, which are not in its weights.

    Without a checkpoint it removes all lines. So it does with evaluations that measured newer
    weights too, with the files of all evaluations that are not in the lines which are left, with
    the records of tokens, and with the kept batches of such steps (``log.replay``).
    Returns the last value of every metric that is left.
    The journal is cut where it is opened (``async_opd.accounting.journal``).
    """
    last, kept, evaluated = dict[str, float](), [], set[int]()
    for line, row in _logged(run_dir):
        newest = row.values.get("eval/newest_version", 0)
        if cut is not None and row.step <= cut.step and newest <= cut.version:
            kept.append(line)
            last |= row.values
            if any(key.startswith(("eval/", "eval_initial/")) for key in row.values):
                evaluated.add(row.step)
    forget_others(run_dir, evaluated)
    forget_after(run_dir, -1 if cut is None else cut.step)
    forget_steps(run_dir, lambda step: cut is None or step > cut.step)
    if (run_dir / METRICS).exists():
        write_atomically(run_dir / METRICS, "".join(f"{line}\n" for line in kept))
    if (run_dir / DEAD_LETTERS).exists():
        size = 0 if cut is None else cut.files.get(DEAD_LETTERS, 0)
        with open(run_dir / DEAD_LETTERS, "ab", opener=regular_file) as file:
            file.truncate(whole_lines(run_dir / DEAD_LETTERS, size))
        last["ledger/dead_lettered"] = 0.0 if cut is None else float(len(cut.ledger.dead_lettered))
    return last


def evaluated_steps(run_dir: Path) -> set[int]:
    """The steps at which ``metrics.jsonl`` has an evaluation of the student."""
    return {
        row.step
        for _, row in _logged(run_dir)
        if any(key.startswith("eval/") for key in row.values)
    }


def _logged(run_dir: Path) -> Iterator[tuple[str, MetricsRow]]:
    """Each line of ``metrics.jsonl`` with its row, without lines torn by a kill."""
    if (run_dir / METRICS).exists():
        found = metrics_rows(foreign(run_dir) / METRICS)
        yield from ((line, row) for line, row in found if row is not None)


def changed_keys(before: dict[str, Any], after: dict[str, Any]) -> list[tuple[str, Any, Any]]:
    """The keys that differ between the configs of a run and may not, with both values."""
    was, now = dict(leaves(before)), dict(leaves(after))
    return [
        (key, was.get(key), now.get(key))
        for key in sorted(was.keys() | now.keys())
        if was.get(key) != now.get(key)
        and not any(fnmatchcase(key, pattern) for pattern in MAY_CHANGE)
    ]
