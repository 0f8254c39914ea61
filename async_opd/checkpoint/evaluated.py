"""``evaluated.json``: the value of ``checkpoint.keep_best`` at each step that was evaluated.

    eval/<source>/accuracy ──mean over what the metric's name matches──► {step: value}

Larger values are better. A value stays after its checkpoint is removed, and becomes invalid where
the run goes another way from an earlier step, which cuts its evaluation's row, or is resumed with
another metric or evaluation.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from pathlib import Path
from statistics import fmean

from pydantic import TypeAdapter, ValidationError

from async_opd.checkpoint.resume import digest_of
from async_opd.config.run_config import RunConfig
from async_opd.core.errors import CheckpointError
from async_opd.core.row import Row
from async_opd.files.foreign import foreign
from async_opd.files.safe_open import make_folder, write_atomically

WHEN = {"every", "every_steps", "teachers", "samples_mib", "replicas"}
"""Settings of ``eval`` that do not change what an evaluation of the student measures."""


@dataclass(frozen=True)
class _Evaluated:
    """The file's content: ``values`` by step, which are comparable under one ``measure``."""

    measure: str = ""
    values: dict[int, float] = field(default_factory=dict)


_File = TypeAdapter(_Evaluated)


def measure_of(config: RunConfig, rows: Sequence[Sequence[Row]]) -> str:
    """Digest of what makes values comparable: the metric, settings of ``eval``, and its rows."""
    how = config.eval.model_dump(mode="json", exclude=WHEN)
    what = json.dumps([config.checkpoint.keep_best, how, digest_of(rows)], sort_keys=True)
    return hashlib.sha256(what.encode()).hexdigest()


def value_of(metric: str, metrics: Mapping[str, float]) -> float | None:
    """The mean of the metrics whose names match the pattern ``metric``; None if there are none."""
    found = [value for name, value in metrics.items() if fnmatchcase(name, metric)]
    return fmean(found) if found else None


@dataclass(frozen=True)
class EvaluatedSteps:
    """The file; every call reads it, since a run and its checkpointer share it."""

    path: Path
    measure: str = ""
    """See ``measure_of``. Values of another measure are not read."""

    def values(self) -> dict[int, float]:
        """Value by step. CheckpointError for a file that was changed or damaged."""
        found = self._read()
        return found.values if found.measure == self.measure else {}

    def add(self, step: int, value: float) -> None:
        """Adds the value of a step, or replaces it. CheckpointError or OSError."""
        self._write(self.values() | {step: value})

    def forget_others(self, steps: Collection[int]) -> int:
        """Removes the values of other steps than ``steps``, whose evaluations the metrics lack.

        It removes all values of another measure, and returns their number.
        """
        found = self._read()
        others = len(found.values) if found.measure != self.measure else 0
        kept = {at: value for at, value in self.values().items() if at in steps}
        if kept != found.values:
            self._write(kept)
        return others

    def _read(self) -> _Evaluated:
        try:
            found = _File.validate_json((foreign(self.path.parent) / self.path.name).read())
            if not all(map(math.isfinite, found.values.values())):
                raise ValueError("a value that is not finite")
        except FileNotFoundError:
            return _Evaluated()
        except (OSError, ValueError) as error:
            cause = "values that are not numbers" if isinstance(error, ValidationError) else error
            raise CheckpointError(
                "checkpoint",
                f"{self.path} cannot be read: {cause}",
                "remove it: which checkpoint is the best is then decided by later evaluations",
            ) from error
        return found

    def _write(self, values: dict[int, float]) -> None:
        make_folder(self.path.parent)
        content = _File.dump_json(_Evaluated(self.measure, values))
        write_atomically(self.path, content.decode())
