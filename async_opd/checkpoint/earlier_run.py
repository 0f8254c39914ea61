"""The files of a run directory, the earlier run in it, and newer files of its mirror.

run directory, checkpoint.mirror ──the newest step──► run directory ──► --resume as ever
"""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from async_opd.accounting.journal import LEDGER
from async_opd.accounting.lineage import (
    ROLL_BACKS,
    Lineage,
    continues,
    is_on_the_way,
    lineage_of,
    read_roll_backs,
    was_left,
    write_roll_backs,
)
from async_opd.checkpoint.resume import IDENTITY, refuse_changes
from async_opd.checkpoint.run_copies import (
    END,
    RESULTS,
    TEACHERS,
    Copy,
    Mirrored,
    RunCopies,
    name_of,
)
from async_opd.checkpoint.store import CONFIG, EVALUATED, FOLDER, Checkpoints, load
from async_opd.config.run_config import RunConfig
from async_opd.core.errors import CheckpointError, ConfigError, Problem
from async_opd.files.foreign import Place, foreign
from async_opd.files.kept_steps import KEPT
from async_opd.files.origin import ORIGIN
from async_opd.files.remote import Changed
from async_opd.files.run_format import FORMAT_FILE, refuse_other_formats
from async_opd.files.safe_open import make_folder, remove_tree, write_atomically
from async_opd.grading.evaluation_files import EVALS
from async_opd.microscope import MICROSCOPE
from async_opd.observability.live.live_file import LIVE_FILE
from async_opd.observability.logged_run import LOGGED_RUNS, take_logged_runs
from async_opd.observability.run_log import DEAD_LETTERS, METRICS, RUN_LOG, SUMMARY
from async_opd.observability.trace import TRACE
from async_opd.pictures import MEDIA

RUN_OUTPUTS = (
    *(SUMMARY, METRICS, LEDGER, DEAD_LETTERS, RUN_LOG, ROLL_BACKS),
    *("model", "best", EVALS, MICROSCOPE, MEDIA, KEPT),
)
"""The files of a run directory that exist once a run has begun."""
PARTIAL = ".mirror.partial"
_RECORDS = {SUMMARY, METRICS, LEDGER, DEAD_LETTERS, RUN_LOG, ROLL_BACKS, ORIGIN}
_RECORDS |= {f"{FOLDER}/{EVALUATED}"}
_COMPARED = {FORMAT_FILE, IDENTITY, *LOGGED_RUNS}
"""Files of a copy that are read where it was downloaded, and are not in the run directory then."""
_OF_MODELS = (".safetensors", ".json", ".jinja", ".txt", ".model", ".md")
_SUFFIXES = {
    FOLDER: (".safetensors", ".json"),
    **dict.fromkeys((TEACHERS, "model", "best"), _OF_MODELS),
    EVALS: (".jsonl",),
    MICROSCOPE: (".npz",),
    MEDIA: (".png", ".jpeg"),
}
"""Those of the files that a resume takes, by folder: code is not among them."""


def may_be_taken(name: str, step: int | None) -> bool:
    """Whether a resume takes a file from the copy of a step, or from that of the end (None).

    The copy may be of somebody else: the run writes its config and its format itself.
    """
    if name in _RECORDS:
        return True
    folder = name.partition("/")[0]
    of_another = folder == FOLDER and not name.startswith(f"{FOLDER}/step_{step}/")
    known = RESULTS if step is None else (FOLDER, TEACHERS)
    return folder in known and not of_another and Path(name).suffix in _SUFFIXES[folder]


def left_in(run_dir: Path) -> list[str]:
    """The files of the run that has begun in the directory."""
    found = [name for name in RUN_OUTPUTS if (run_dir / name).exists()]
    return found + ([FOLDER] if Checkpoints(run_dir / FOLDER, 1).steps() else [])


def outputs(config: RunConfig) -> list[str]:
    """The files and folders of the run directory of a run that completes without a fault."""
    log = config.log
    optional = {
        EVALS: bool(config.data.eval) and config.eval.samples_mib > 0,
        MICROSCOPE: log.microscope.share > 0,
        KEPT: log.replay,
        "best": config.checkpoint.keep_best is not None,
        "wandb": log.wandb != "off",
        "wandb_run.json": log.wandb != "off",
        "tensorboard": "tensorboard" in log.loggers,
    }
    always = (
        *("config.yaml", IDENTITY, FORMAT_FILE, ORIGIN, METRICS, LEDGER, RUN_LOG, SUMMARY, TRACE),
        *(LIVE_FILE, FOLDER, "model", "ray_logs"),
    )
    return [*always, *(name for name, written in optional.items() if written)]


def refuse_begun_in_other_format(run_dir: Path) -> None:
    """ConfigError for a directory in which a run of another version's format has begun."""
    if left_in(run_dir) or (run_dir / FORMAT_FILE).exists():
        refuse_other_formats(run_dir)


def refuse_begun(run_dir: Path) -> None:
    """ConfigError if a run has begun in the directory."""
    found = left_in(run_dir)
    if found:
        message = f"{run_dir} holds an earlier run: {', '.join(found)}"
        remedy = "add --resume to continue it, or choose another --run-dir for a new run"
        raise ConfigError([Problem("command line", "run_dir", message, remedy)])


@contextmanager
def _answering(url: str) -> Iterator[None]:
    """CheckpointError if the store does not answer: nothing is known of the run then."""
    try:
        yield
    except OSError as error:
        remedy = "make it reachable, or remove checkpoint.mirror from the config to go on without"
        raise CheckpointError("mirror", f"{url} cannot be read: {error}", remedy) from error


def refuse_mirrored(url: str) -> None:
    """ConfigError if the URL has a copy of a run: another one would replace it.

    CheckpointError if the store does not answer.
    """
    with _answering(url):
        copies = RunCopies.at(url)
        found = bool(copies.steps() or copies.complete(END))
    if found:
        message = f"{url} holds an earlier run"
        remedy = "add --resume to continue it, or choose another URL for a new run"
        raise ConfigError([Problem("command line", "checkpoint.mirror", message, remedy)])


def newest_mirrored(url: str, run_dir: Path) -> int:
    """The newest step at the URL that a resume may take; 0 without one.

    ConfigError and CheckpointError as ``take_mirrored``.
    """
    with _answering(url):
        there = RunCopies.at(url).mirrored()
        way = _way(url, run_dir, there)
    return max((step for step, _ in there.on_the_way(way)), default=0)


def refuse_another(run_dir: Path, identity: str) -> None:
    """ConfigError if the last checkpoint, or a completed run, has another config, or none."""
    steps, completed = Checkpoints(run_dir / FOLDER, 1).steps()[-1:], is_completed(run_dir)
    names = [f"{FOLDER}/{name_of(step)}/{CONFIG}" for step in steps]
    compared = 0
    for name in [*names, *([IDENTITY] if completed else [])]:
        try:
            found = (foreign(run_dir) / name).read()
        except FileNotFoundError:
            continue
        except OSError as error:
            message = f"{run_dir / name} cannot be read: {error.strerror or error}"
            remedy = "restore the run directory as it was, or choose another --run-dir"
            raise ConfigError([Problem("--resume", "run_dir", message, remedy)]) from error
        refuse_changes(found, identity)
        compared += 1
    if completed and not compared:
        message = f"{run_dir} has completed, but has no {IDENTITY}, so it may be of another run"
        remedy = "choose another --run-dir: an older version wrote this one, or another user did"
        raise ConfigError([Problem("--resume", "run_dir", message, remedy)])


def is_completed(run_dir: Path) -> bool:
    """Whether the directory has the model and the summary of a completed run."""
    return _completed(run_dir) and (run_dir / "model").is_dir()


def _completed(folder: Place) -> bool:
    try:
        summary = json.loads((foreign(folder) / SUMMARY).read())
    except (OSError, ValueError, RecursionError):
        return False
    return isinstance(summary, dict) and bool(summary.get("status") == "completed")


def take_mirrored(url: str, run_dir: Path, identity: str) -> list[str]:
    """Takes the newest copy at the URL, if its checkpoint is newer than those of the directory.

    Damaged checkpoints of the directory do not count, nor do those that the run has left, here or
    at the URL: see ``_way``. The directory gets the rollbacks that the URL knows. Every byte is
    verified before a file of the directory is replaced, and neither the run's descriptions
    (``config.yaml``, ``run.json``, …) nor code is taken. Returns messages. ConfigError for a copy
    of another config or format, also an older one, for one of another way of the run, and for
    folders that no mirror wrote: this run's mirror would remove them. CheckpointError
    if no newer copy is whole, or if the store does not answer: a run that began without its
    checkpoints would train them again.
    """
    with _answering(url):
        return _taken(url, run_dir, identity)


def _taken(url: str, run_dir: Path, identity: str) -> list[str]:
    notes: list[str] = []
    copies, partial = RunCopies.at(url), run_dir / PARTIAL
    steps = copies.steps()
    if not steps:
        notes = _taken_completed(copies, run_dir, identity)
        if not notes and not Checkpoints(run_dir / FOLDER, 1).steps():
            _keep_roll_backs(copies.mirrored(), run_dir, run_dir)
        return notes
    if not copies.claimed():
        message = f"{url} has {name_of(steps[-1])}, which no mirror wrote"
        remedy = "name a URL of this run alone"
        raise ConfigError([Problem("--resume", "checkpoint.mirror", message, remedy)])
    there, store = copies.mirrored(), Checkpoints(run_dir / FOLDER, 1)
    try:
        way = _way(url, run_dir, there)
    except ConfigError:
        for _, copy in there.copies[-1:]:  # of another run? then that is the cause
            _refuse_older(copies, copy, partial, identity)
        raise
    own = _newest_valid(store, way) if there.copies else -1
    found = [(step, copy) for step, copy in there.on_the_way(way) if step > own]
    if there.copies and not found:
        _refuse_older(copies, there.copies[-1][1], partial, identity)
    for step, copy in reversed(found):
        remove_tree(partial)
        try:
            _download(copies, copy, partial, functools.partial(may_be_taken, step=step))
            checkpoint = load(partial / FOLDER / name_of(step))
        except (Changed, CheckpointError) as error:
            notes.append(f"the mirror's copy of step {step} is skipped: {error}")
            continue
        try:
            refuse_changes(checkpoint.config, identity)
            refuse_other_formats(partial)
        except ConfigError:
            remove_tree(partial)
            raise
        _take_end(copies, partial, step, identity, notes.append)
        _keep_roll_backs(there, run_dir, partial)
        notes += _leave(store, way)
        _replace(partial, run_dir, f"{FOLDER}/{name_of(step)}")
        remove_tree(partial)
        return [*notes, f"step {step} is taken from {url}, with the run's other files"]
    remove_tree(partial)
    if found:
        remedy = f"remove {url}, or checkpoint.mirror from the config, to go on without it"
        raise CheckpointError("checkpoint", "; ".join(notes), remedy)
    _keep_roll_backs(there, run_dir, run_dir)
    return notes + _leave(store, way)


def _way(url: str, run_dir: Path, there: Mirrored) -> Lineage:
    """The lineage that the run goes on with: that of the directory, or that of the URL.

    The URL's if a process that took its copy went on elsewhere: then checkpoints which that one did
    not know are not on the way. ConfigError if it has not come as far as these, or does not know a
    rollback of the directory: to go on with either would lose the other. CheckpointError.
    """
    store, theirs = Checkpoints(run_dir / FOLDER, 1), there.lineage
    here = store.lineage()
    if continues(here, theirs):
        return here
    newest = max((step for step, _ in there.on_the_way(theirs)), default=-1)
    allowed = lineage_of(there.roll_backs)
    further = [
        step
        for step, its in store.lineages().items()
        if step > newest
        and not is_on_the_way(step, its, theirs)
        and not was_left(step, its, allowed)
    ]
    if continues(theirs, lineage_of(read_roll_backs(run_dir))) and not further:
        return theirs
    message = f"{url} has another way of the run, until step {newest}: it went on elsewhere"
    has = f"step {further[-1]}" if further else "a rollback"
    message += f", and {run_dir} has {has} that is not on it"
    remedy = "name another --run-dir to go on from the URL, or another URL to go on from here"
    raise ConfigError([Problem("--resume", "checkpoint.mirror", message, remedy)])


def _newest_valid(store: Checkpoints, way: Lineage) -> int:
    """The step of the newest checkpoint on the way that is not damaged; -1 if there is none."""
    for step in reversed(store.steps()):
        with suppress(CheckpointError):
            found = store.load(step)
            if is_on_the_way(step, found.cut.lineage, way):
                return step
    return -1


def _leave(store: Checkpoints, way: Lineage) -> list[str]:
    """Leaves the checkpoints that are not on the way; returns messages."""
    lineages = store.lineages().items()
    return [store.leave(step) for step, its in lineages if not is_on_the_way(step, its, way)]


def _keep_roll_backs(there: Mirrored, run_dir: Path, into: Path) -> None:
    """Writes ``into`` the rollbacks of the URL or the directory, if there are more than it has."""
    known = max(there.roll_backs, read_roll_backs(run_dir), key=len)
    if len(known) > len(read_roll_backs(into)):
        make_folder(into)
        write_roll_backs(into, known)


def _refuse_older(copies: RunCopies, copy: Copy, partial: Path, identity: str) -> None:
    """ConfigError if a copy that is not taken is of another config: of another run."""
    name = f"{FOLDER}/{copy.name}/{CONFIG}"
    remove_tree(partial)
    try:
        copies.download(copy, partial, lambda one: one == name)
        refuse_changes((foreign(partial) / name).read(), identity)
    except (Changed, FileNotFoundError):  # a damaged copy, in whose place the run's own comes
        return
    finally:
        remove_tree(partial)


def _take_end(
    copies: RunCopies, partial: Path, step: int, identity: str, notify: Callable[[str], None]
) -> None:
    """Puts the files of the run's end, if it is there, over those of its last checkpoint.

    The models are only taken of a run that has completed: another one writes its own.
    """
    end, into = copies.complete(END), partial.with_name(f"{PARTIAL}.{END}")
    if end is None:
        return
    try:
        _download_end(copies, end, into)
        _take_models(copies, end, into, identity)
        _replace(into, partial, "")
    except (Changed, ConfigError) as error:
        notify(f"the mirror's copy of the end is skipped, that of step {step} is taken: {error}")
    finally:
        remove_tree(into)


def _taken_completed(copies: RunCopies, run_dir: Path, identity: str) -> list[str]:
    """Takes the end of a completed run that has no checkpoint (``checkpoint.every: 0``).

    ConfigError for that of another config; if the directory has checkpoints, and so is of another
    run, whose mirror would remove that end.
    """
    end, partial = copies.complete(END), run_dir / PARTIAL
    if end is None or is_completed(run_dir):
        return []
    try:
        _download_end(copies, end, partial)
        if not _completed(partial):
            return []
        _take_models(copies, end, partial, identity)
        if Checkpoints(run_dir / FOLDER, 1).steps():
            message = f"{copies.place} holds another run, which completed without a checkpoint"
            remedy = "name a URL of this run alone"
            raise ConfigError([Problem("--resume", "checkpoint.mirror", message, remedy)])
        if not (run_dir / IDENTITY).exists():  # that of the copy was compared with it
            write_atomically(run_dir / IDENTITY, identity)
        _replace(partial, run_dir, "")
    finally:
        remove_tree(partial)
    return [f"the end of a completed run is taken from {copies.place}"]


def _download_end(copies: RunCopies, end: Copy, into: Path) -> None:
    """Downloads the files of an end, without its models."""
    remove_tree(into)
    models = _models(end)
    _download(copies, end, into, lambda name: may_be_taken(name, None) and name not in models)


def _take_models(copies: RunCopies, end: Copy, into: Path, identity: str) -> None:
    """Downloads the models of an end beside its other files, if its run has completed.

    ConfigError for the end of a run of another config: a completed one would be this run's.
    """
    try:
        found = (foreign(into) / IDENTITY).read()
    except FileNotFoundError:
        message = f"{copies.place / END} has no {IDENTITY}, so it may be of another run"
        remedy = "name another URL; a version without the file wrote it, or somebody else"
        raise ConfigError([Problem("--resume", "checkpoint.mirror", message, remedy)]) from None
    refuse_changes(found, identity)
    refuse_other_formats(into)
    if _completed(into):
        models = _models(end)
        copies.download(end, into, lambda name: may_be_taken(name, None) and name in models)


def _download(copies: RunCopies, copy: Copy, into: Path, wanted: Callable[[str], bool]) -> None:
    copies.download(copy, into, lambda name: wanted(name) or name in _COMPARED)


def _make_folders(target: Path, name: str) -> None:
    """Makes the folders of a file below ``target``. OSError if one of them is a link."""
    for part in reversed(Path(name).parents):
        make_folder(target / part)


def _models(copy: Copy) -> set[str]:
    return {name for name in copy.files if name.partition("/")[0] in ("model", "best")}


def _replace(source: Path, target: Path, last: str) -> None:
    """Moves what is taken to the same places below ``target``; the folder ``last`` whole, and last.

    A kill before that leaves a directory without the checkpoint, which takes the copy again.
    """
    take_logged_runs(source, target)
    for path in sorted(source.rglob("*")):
        name = path.relative_to(source).as_posix()
        if path.is_file() and name not in _COMPARED and not (last and name.startswith(f"{last}/")):
            _make_folders(target, name)
            path.replace(target / name)
    if last:
        _make_folders(target, last)
        remove_tree(target / last)
        (source / last).rename(target / last)
