"""``evaluated.json``: the value of ``checkpoint.keep_best`` at each step that was evaluated.

    eval/<source>/accuracy ──mean over what the metric's name matches──► {step: value}

Larger values are better. A value stays after its checkpoint is removed, and becomes invalid where
the run goes another way from an earlier step.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from statistics import fmean

from pydantic import TypeAdapter, ValidationError

from async_opd.core.errors import CheckpointError
from async_opd.files.safe_open import make_folder, read_bytes, write_atomically

_Values = TypeAdapter(dict[int, float])


def value_of(metric: str, metrics: Mapping[str, float]) -> float | None:
    """The mean of the metrics whose names match the pattern ``metric``; None if there are none."""
    found = [value for name, value in metrics.items() if fnmatchcase(name, metric)]
    return fmean(found) if found else None


@dataclass(frozen=True)
class EvaluatedSteps:
    """The file; every call reads it, since a run and its checkpointer share it."""

    path: Path

    def values(self) -> dict[int, float]:
        """Value by step. CheckpointError for a file that was changed or damaged."""
        try:
            found = _Values.validate_json(read_bytes(self.path))
            if not all(map(math.isfinite, found.values())):
                raise ValueError("a value that is not finite")
        except FileNotFoundError:
            return {}
        except (OSError, ValueError) as error:
            cause = "values that are no numbers" if isinstance(error, ValidationError) else error
            raise CheckpointError(
                "checkpoint",
                f"{self.path} cannot be read: {cause}",
                "remove it: which checkpoint is the best is then decided by later evaluations",
            ) from error
        return found

    def add(self, step: int, value: float) -> None:
        """Adds the value of a step, or replaces it. CheckpointError or OSError."""
        self._write(self.values() | {step: value})

    def forget_after(self, step: int) -> None:
        """Removes the values of later steps, whose weights the run does not reach again."""
        values = self.values()
        kept = {at: value for at, value in values.items() if at <= step}
        if kept != values:
            self._write(kept)

    def _write(self, values: dict[int, float]) -> None:
        make_folder(self.path.parent)
        write_atomically(self.path, json.dumps(values))
