"""Entries that the tables of several frameworks share."""

from __future__ import annotations

import json
from typing import Any

from async_opd.config.keys import default_of, keys_below
from async_opd.config.paths import hub_source_of
from async_opd.tools.importing.draft import Draft
from async_opd.tools.importing.entries import ABSENT

FILES = (".parquet", ".jsonl", ".json")
PLACEHOLDER = "data/train.jsonl"
"""The file that is named where the framework names no data that can be read here."""

FROZEN = ["vision_tower", "projector"]
"""Other frameworks' vision tower: of Qwen's models their projector is a part of it."""


def importable(key: str, value: Any) -> Any:
    """The value, or nothing if this version has no such key."""
    section, _, name = key.rpartition(".")
    return value if name in keys_below(section) else ABSENT


def paths(value: Any) -> list[str]:
    """One path or several, as a list."""
    return [str(one) for one in value] if isinstance(value, list) else [str(value)]


def batches(draft: Draft, batch: int, sync: int, threshold: float) -> None:
    """Sizes of a step and of a weight version, and how far rollouts may run ahead."""
    draft.ours["train.batch_size"] = batch
    draft.ours["async.staleness_threshold"] = threshold
    draft.ours["async.sync_steps"] = sync
    draft.put(
        "queue.max_samples", batch if batch > (default_of("queue.max_samples") or 0) else ABSENT
    )


def epochs(draft: Draft, steps: float | None, count: float | None) -> None:
    """The length of the run: optimizer steps, or passes over the data."""
    count = int(count) if count is not None and count.is_integer() else count
    if steps is not None and int(steps) > 0:
        draft.ours["train.steps"] = int(steps)
    elif count is not None and importable("train.epochs", count) is not ABSENT:
        draft.ours["train.epochs"] = count
    elif count is not None:
        draft.fill_in.append(f"train.steps: {count} epochs of your rows, divided by the batch")


def evaluation_every(draft: Draft, evaluate: float | None, save: float | None, sync: int) -> None:
    """Evaluations and checkpoints: every so many steps there, every so many versions here."""
    for key, steps in (("eval.every", evaluate), ("checkpoint.every", save)):
        if steps is not None:
            draft.ours[key] = max(round(int(steps) / sync), 1) if int(steps) > 0 else 0


def joined_files(draft: Draft) -> None:
    """Several files are one list of rows there: here each is a source, mixed by its size."""
    if len(draft.ours.get("data.train") or ()) > 1:
        draft.ours["data.size_temperature"] = 1
        draft.differs.append(
            "data.train_files: their rows are joined and shuffled together there; here each file "
            "is a source whose share is its size, so the order differs"
        )


def log_to(draft: Draft, destinations: Any) -> None:
    """Loggers by their names there; unknown ones are left out."""
    names = paths(destinations) if destinations else []
    known = [name for name in ("tensorboard", "mlflow", "trackio") if name in names]
    if "all" not in names and "wandb" not in names:
        draft.ours["log.wandb"] = "off"
    if known:
        draft.ours["log.loggers"] = known


def template_variables(draft: Draft, key: str) -> None:
    """Variables of the chat template, in a section or as JSON."""
    given = draft.take(key)
    values = {name: draft.take(f"{key}.{name}") for name in draft.below(key)}
    try:
        values |= json.loads(given) if isinstance(given, str) else given or {}
    except (ValueError, TypeError):
        draft.unmapped[key] = f"{given!r} is not a JSON object"
    if values:
        draft.ours["student.chat_template_kwargs"] = values


def finish(draft: Draft) -> None:
    """Fills in what a config needs and the file does not say, and names it."""
    if not draft.ours.get("student.model"):
        draft.ours["student.model"] = "STUDENT"
        draft.fill_in.append("student.model: a directory or a hub id")
    if not draft.ours.get("data.train"):
        draft.ours["data.train"] = [PLACEHOLDER]
        draft.fill_in.append("data.train: a file with your prompts")
    teachers = {key.split(".")[1] for key in draft.ours if key.startswith("teachers.")}
    for name in teachers:
        model = f"teachers.{name}.model"
        known = any(draft.ours.get(f"teachers.{name}.{one}") for one in ("kind", "model"))
        if not known:
            draft.ours[model] = "TEACHER"
            draft.fill_in.append(f"{model}: a directory or a hub id")
    if not teachers:
        draft.ours["teachers.teacher.model"] = "TEACHER"
        draft.fill_in.append("teachers.teacher.model: a directory or a hub id")
    if draft.ours.get("loss.support") == "student_topk" and "rollout.top_p" in draft.ours:
        draft.ours["rollout.top_p"] = 1.0
        draft.differs.append(
            "top_p: 1 here, since the student's best tokens are taken of those that it samples from"
        )
    if len(teachers) <= 1:
        _all_rows(draft, next(iter(teachers), "teacher"))


def _all_rows(draft: Draft, teacher: str) -> None:
    """Gives the only teacher all rows, whose fields need not name it, unless it has routes."""
    if f"teachers.{teacher}.sources" in draft.ours:
        return
    for key in ("data.train", "data.eval"):
        sources = draft.ours.get(key)
        if isinstance(sources, list):
            draft.ours[key] = [{**_source(one), "data_source": teacher} for one in sources]


def _source(given: Any) -> dict[str, Any]:
    """A source's keys, of a file's path or of the hub's data set (``hf:``) too."""
    if isinstance(given, dict):
        return given
    return hub_source_of(given[3:]) if given.startswith("hf:") else {"path": given}
