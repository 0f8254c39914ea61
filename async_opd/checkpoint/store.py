"""Checkpoints on disk: a checkpoint is loaded only if it is complete and unchanged.

    .step_N.*.partial/ each rank of the trainer writes its file, the driver cut.json and, last,
          │            the manifest; each writer flushes its file to the disk (fsync)
          ▼ rename
    step_N/            manifest.json: size and SHA-256 of every other file
          │ the newest ``keep`` stay, the one with the best evaluation, and one from before the
          │ guardrail's window if it may roll the run back
          ▼
    step_N.damaged/    a file is missing, unexpected or changed: skipped, kept for inspection
    step_N.left/       the run has gone back to before it, or has gone on from a mirror without it

Calls block: callers use a thread. Files are JSON and safetensors; none is unpickled.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from secrets import token_hex

from pydantic import TypeAdapter, ValidationError

from async_opd.accounting.lineage import Lineage, lineage_of, longest, read_roll_backs, was_left
from async_opd.accounting.run_state import Cut
from async_opd.checkpoint.evaluated import EvaluatedSteps, measure_of
from async_opd.config.run_config import RunConfig
from async_opd.core.errors import CheckpointError
from async_opd.core.reports import WrittenFile
from async_opd.core.row import Row
from async_opd.files.durable import checksum, flush, written_file
from async_opd.files.foreign import ForeignPath, Place, foreign
from async_opd.files.kept_steps import forget_steps
from async_opd.files.safe_open import (
    FOLDER_MODE,
    make_folder,
    refuse_link,
    regular_file,
    remove_tree,
)

CUT, MANIFEST, CONFIG = "cut.json", "manifest.json", "config.json"
CUT_BYTES = 64 << 20
FOLDER, EVALUATED = "checkpoints", "evaluated.json"
_STEP = re.compile(r"step_(0|[1-9]\d{0,15})", re.ASCII)


@dataclass(frozen=True)
class Checkpoint:
    """A verified checkpoint."""

    folder: Path
    cut: Cut
    config: str


_Manifest = TypeAdapter(dict[str, WrittenFile])
_Cut = TypeAdapter(Cut)


@dataclass(frozen=True)
class Checkpoints:
    """The folder ``checkpoints/`` of a run directory, with the newest ``keep`` checkpoints.

    Of the steps in ``evaluated`` the best one that has a checkpoint is kept, too. ``window`` is
    that of a guardrail that rolls back, in steps, else 0: see ``superseded``. ``measure`` is that
    of ``evaluated``.
    """

    folder: Path
    keep: int
    window: int = 0
    measure: str = ""

    @classmethod
    def of(cls, config: RunConfig, run_dir: Path, rows: Sequence[Sequence[Row]]) -> Checkpoints:
        """Those of a run; ``rows`` are those of ``data.eval``."""
        guardrail = config.guardrail
        return cls(
            run_dir / FOLDER,
            config.checkpoint.keep,
            guardrail.window if guardrail.mode == "roll_back" else 0,
            measure_of(config, rows),
        )

    def begin(self, step: int) -> Path:
        """Makes an empty folder for the files of a checkpoint, of a new name. OSError.

        A late writer of an earlier checkpoint writes no file into this one.
        """
        part = self.folder / f".step_{step}.{token_hex(4)}.partial"
        make_folder(self.folder)
        part.mkdir(mode=FOLDER_MODE)
        return part

    def commit(
        self,
        part: Path,
        cut: Cut,
        config: str,
        files: Mapping[str, WrittenFile],
        evaluating: int | None = None,
    ) -> Path:
        """Makes the folder a checkpoint and removes the oldest. OSError: no checkpoint changed.

        Kept batches of steps before the oldest one that is left are removed, too.

        ``files`` are those that the trainer says to have written; any others are refused. That of
        the step ``evaluating`` stays.
        """
        target = self.folder / f"step_{cut.step}"
        if target.exists():  # a checkpoint of this step has the same weights: it stays
            remove_tree(part)
            return target
        _refuse_other_files(part, files)
        manifest = {
            **files,
            CUT: _write(part / CUT, _Cut.dump_json(cut)),
            CONFIG: _write(part / CONFIG, config.encode()),
        }
        _write(part / MANIFEST, _Manifest.dump_json(manifest, indent=1))
        flush(part)
        part.rename(target)
        flush(self.folder)
        stay = self.best(), evaluating
        old = superseded(self.steps(), self.keep, self.window)
        gone = [step for step in old if step not in stay]
        for step in gone:
            remove_tree(self.folder / f"step_{step}")
        if gone:  # until then the run's start is the oldest one that steps can be computed from
            oldest = self.steps()[0]
            with suppress(OSError):
                forget_steps(self.folder.parent, lambda step: step <= oldest)
        return target

    @property
    def _there(self) -> ForeignPath:
        return foreign(self.folder.parent) / self.folder.name

    def _unfinished(self) -> list[ForeignPath]:
        """Folders of checkpoints that are being written, or were when the run was killed."""
        return [one for one in self._there.entries() if fnmatchcase(one.name, ".step_*.partial")]

    @property
    def evaluated(self) -> EvaluatedSteps:
        """The evaluations that checkpoints are compared by; none unless the run keeps the best."""
        return EvaluatedSteps(self.folder / EVALUATED, self.measure)

    def best(self) -> int | None:
        """The evaluated checkpoint with the largest value, the newest of equal ones.

        None if there is none, or if the values cannot be read.
        """
        try:
            values = self.evaluated.values()
        except CheckpointError:  # ``newest`` and evaluations report it
            return None
        return max(
            (step for step in self.steps() if step in values),
            key=lambda step: (values[step], step),
            default=None,
        )

    def steps(self) -> list[int]:
        """Steps of all checkpoints, the oldest first."""
        return steps_in(self._there)

    def begun(self) -> set[int]:
        """Steps of all checkpoints, and of those that are being written."""
        parts = (part.name for part in self._unfinished())
        numbers = (name.removeprefix(".step_").partition(".")[0] for name in parts)
        return {*self.steps(), *(int(number) for number in numbers if number.isdecimal())}

    def before(self, step: int) -> int:
        """The step that ``roll_back`` goes back to; 0 without a checkpoint."""
        first, *later = self.steps() or [0]
        return max([one for one in later if one <= step], default=first)

    def roll_back(self, step: int) -> None:
        """Removes the checkpoints after ``step``; the oldest one stays. OSError."""
        newest = self.before(step)
        for one in self.steps():
            if one > newest:
                remove_tree(self.folder / f"step_{one}")

    def lineages(self) -> dict[int, Lineage]:
        """The lineage of each step's checkpoint whose cut can be read."""
        found: dict[int, Lineage] = {}
        for step in self.steps():
            with suppress(OSError, ValueError):
                cut = self._there / f"step_{step}/{CUT}"
                found[step] = parse_cut(cut.read(CUT_BYTES)).lineage
        return found

    def lineage(self) -> Lineage:
        """That of the run until now, with its rollbacks. CheckpointError: they cannot be read."""
        back = lineage_of(read_roll_backs(self.folder.parent))
        return longest([back, *self.lineages().values()])

    def leave(self, step: int) -> str:
        """Renames a checkpoint that the run has left; returns a message. OSError."""
        path = self.folder / f"step_{step}"
        left = path.with_name(f"{path.name}.left")
        remove_tree(left)
        path.rename(left)
        return f"the run has gone on without step {step}: it is skipped, and is now {left.name}"

    def load(self, step: int) -> Checkpoint:
        """The checkpoint of this step: see ``load``. CheckpointError if it is damaged."""
        return load(self.folder / f"step_{step}")

    def newest(self, notify: Callable[[str], None]) -> Checkpoint | None:
        """The newest valid checkpoint that no rollback has left.

        ``notify`` gets a message about each damaged or left one that is newer. Unfinished ones
        are removed. CheckpointError if the folder is a link, or rollbacks cannot be read.
        """
        try:
            refuse_link(self.folder)
        except OSError as error:
            remedy = "put the directory itself there"
            raise CheckpointError("checkpoint", str(error), remedy) from error
        for part in self._unfinished():
            remove_tree(self.folder / part.name)
        back = lineage_of(read_roll_backs(self.folder.parent))
        for step in reversed(self.steps()):
            path = self.folder / f"step_{step}"
            try:
                found = load(path)
                if not was_left(step, found.cut.lineage, back):
                    return found
                notify(self.leave(step))  # the run was killed before it removed it
            except CheckpointError as error:
                damaged = path.with_name(path.name + ".damaged")
                remove_tree(damaged)
                path.rename(damaged)
                notify(f"{error.cause}: it is skipped, and is now {damaged.name}")
        return None

    def forget_evaluations(self, logged: Collection[int], notify: Callable[[str], None]) -> None:
        """Forgets the values of steps whose evaluation is not ``logged``, or by another measure."""
        try:
            others = self.evaluated.forget_others(logged)
            if others:
                notify(
                    f"the values of {others} evaluated steps are not compared: checkpoint.keep_best"
                    ", data.eval or settings of eval were others"
                )
        except CheckpointError as error:
            notify(str(error))


def superseded(steps: Sequence[int], keep: int, window: int) -> list[int]:
    """The steps (ascending) without the newest ``keep`` and those that a rollback needs.

    A rollback goes back ``window`` steps from the newest one. It needs the newest checkpoint from
    before that, and the one that follows, which is that checkpoint for later steps: at most two
    windows are lost, however many checkpoints a window has.
    """
    before = sum(step <= steps[-1] - window for step in steps) if steps else 0
    needed = {*steps[-keep:], *steps[max(before - 1, 0) : before + 1]}
    return [step for step in steps if step not in needed]


def parse_cut(content: bytes) -> Cut:
    """The content of a checkpoint's ``cut.json``. ValueError."""
    return _Cut.validate_json(content)


def load(folder: Place) -> Checkpoint:
    """Verifies every byte of a checkpoint. CheckpointError with the cause."""
    try:
        at = in_its_run(folder)
        there = at.entries()
        irregular = [one.name for one in there if not one.is_file()]
        if irregular:  # reading a pipe or a device might never end
            raise ValueError(f"{irregular} are not regular files")
        manifest = _Manifest.validate_json((at / MANIFEST).read())
        found = {one.name for one in there} - {MANIFEST}
        if found != set(manifest):
            raise ValueError(f"files {sorted(found ^ set(manifest))} are missing or unexpected")
        with ThreadPoolExecutor(8) as reading:
            read = reading.map(checksum, (at / name for name in manifest))
            for (name, file), now in zip(manifest.items(), read, strict=True):
                if now != file:
                    raise ValueError(f"{name} was changed or cut off")
        cut = parse_cut((at / CUT).read(CUT_BYTES))
        if at.name != f"step_{cut.step}":
            raise ValueError(f"its {CUT} is of step {cut.step}")
        return Checkpoint(at.as_path(), cut, (at / CONFIG).read().decode())
    except (OSError, ValueError) as error:
        cause = str(error)
        if isinstance(error, ValidationError):  # a ValueError, whose text quotes the file
            cause = f"{CUT} or {MANIFEST} has {error.error_count()} invalid values"
        raise CheckpointError("checkpoint", f"{folder} is not a checkpoint: {cause}") from error


def in_its_run(checkpoint: Place) -> ForeignPath:
    """A checkpoint's place below its run directory, on the way to which links are refused, too."""
    given = foreign(checkpoint)
    path = Path(os.path.abspath(given.root))
    return given if given.parts else ForeignPath(path.parent.parent, path.parts[-2:])


def steps_in(folder: ForeignPath) -> list[int]:
    """Steps of the checkpoints in a folder, the oldest first. OSError."""
    matches = ((_STEP.fullmatch(path.name), path) for path in folder.entries())
    return sorted(int(match[1]) for match, path in matches if match and path.is_dir())


def _refuse_other_files(part: Path, files: Mapping[str, WrittenFile]) -> None:
    """OSError if the folder has other files than these, or one of another size.

    Each is looked up by its name: a shared directory may list another node's new files late.
    """
    wrong = sorted({path.name for path in part.iterdir()} - files.keys())
    wrong += [name for name, file in files.items() if (part / name).stat().st_size != file.bytes]
    if wrong:
        raise OSError(f"{part} has other files than the trainer wrote: {wrong}")


def _write(path: Path, content: bytes) -> WrittenFile:
    with open(path, "xb", opener=regular_file) as file:
        file.write(content)
    return written_file(path)
