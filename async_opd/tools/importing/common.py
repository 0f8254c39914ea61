"""Steps that the functions of several frameworks have in common."""

from __future__ import annotations

import json
from typing import Any

from async_opd.config.keys import default_of
from async_opd.config.paths import hub_source_of
from async_opd.tools.importing.draft import Draft
from async_opd.tools.importing.table import paths

FROZEN = ["vision_tower", "projector"]
"""Other frameworks' vision tower: of Qwen's models their projector is a part of it."""


def batches(draft: Draft, batch: int, sync: int, threshold: float) -> None:
    """Sizes of a step and of a weight version, and how far rollouts may run ahead."""
    draft.ours["train.batch_size"] = batch
    draft.ours["async.staleness_threshold"] = threshold
    draft.ours["async.sync_steps"] = sync
    if batch > (default_of("queue.max_samples") or 0):
        draft.put("queue.max_samples", batch)


def length(draft: Draft, steps: float | None, *epochs: str, default: float | None = None) -> None:
    """The length of the run: optimizer steps, else passes over the data by the keys ``epochs``."""
    if steps is not None and int(steps) > 0:
        draft.ours["train.steps"] = int(steps)
        return
    count = draft.given(*epochs)
    count = default if count is None else count
    if count is not None:
        draft.ours["train.epochs"] = int(count) if float(count).is_integer() else count


def evaluation_every(
    draft: Draft, evaluate: tuple[str, ...], save: tuple[str, ...], sync: int, default: float = -1
) -> None:
    """Evaluations and checkpoints: every so many steps there, every so many versions here."""
    for key, theirs in (("eval.every", evaluate), ("checkpoint.every", save)):
        steps = int(draft.number(*theirs, default=default))
        draft.ours[key] = max(round(steps / sync), 1) if steps > 0 else 0


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
    draft.put("log.wandb", "auto" if {"all", "wandb"} & {*names} else "off")
    if known:
        draft.ours["log.loggers"] = known


def section(draft: Draft, key: str, ours: str) -> bool:
    """One value here of a section, a dictionary or JSON; whether the file gives it."""
    given = draft.take(key)
    names = [one for one in draft.theirs if one.startswith(f"{key}.")]
    values = {one.removeprefix(f"{key}."): draft.take(one) for one in names}
    draft.unreadable |= {
        f"{key}.{one}": "it has a dot or a section in it" for one in values if "." in one
    }
    try:
        values |= json.loads(given) if isinstance(given, str) else given or {}
    except (ValueError, TypeError, RecursionError):
        draft.unreadable[key] = f"{given!r} is not a JSON object"
    if values:
        draft.ours[ours] = values
    return bool(values)


def complete(draft: Draft) -> None:
    """Fills in what a config needs and the file does not give, and names it."""
    missing = "the file does not give it: write a directory or a hub id"
    if not draft.ours.get("student.model"):
        draft.fill("student.model", missing)
    if not draft.ours.get("data.train"):
        draft.fill("data.train", "the file does not give it: write a file with your prompts")
    teachers = list(dict.fromkeys(k.split(".")[1] for k in draft.ours if k.startswith("teachers.")))
    for name in teachers or ["teacher"]:
        if not any(draft.ours.get(f"teachers.{name}.{one}") for one in ("kind", "model")):
            draft.fill(f"teachers.{name}.model", missing)
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
