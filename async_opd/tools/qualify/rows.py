"""The rows of ``async_opd qualify``, which ``rows.yaml`` has: when each has passed."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from importlib.resources import files
from typing import Any

import yaml

Cell = dict[str, Any]
REASONS = ("skipped", "not_reached", "out_of_memory", "failed")
"""The keys under which a cell without figures says why it has none. ``not_reached``: the row's time
was over."""


@dataclass(frozen=True)
class Bound:
    """The limits of a figure, which every measured cell with the values ``of`` must have.

    ``gpu``: it is not for the small sizes of a CPU.
    """

    figure: str
    most: float = math.inf
    least: float = -math.inf
    of: Mapping[str, Any] = field(default_factory=dict)
    gpu: bool = False

    def __str__(self) -> str:
        limits = [f"at least {self.least:g}"] * (self.least > -math.inf)
        limits += [f"at most {self.most:g}"] * (self.most < math.inf)
        where = ", ".join(f"{key} {value}" for key, value in self.of.items())
        return f"{self.figure} {' and '.join(limits)}" + (f" ({where})" if where else "")

    def broken(self, cells: Sequence[Cell]) -> list[str]:
        """A line for each cell beyond the limits or without the figure; one if there is no cell."""
        own = [cell for cell in cells if all(cell.get(key) == v for key, v in self.of.items())]
        measured = [cell for cell in own if not reason(cell)]
        if not measured and not any("not_reached" in cell for cell in own):
            return [f"{self}: no cell has this figure"]
        lacking = [cell for cell in measured if self.figure not in cell]
        found = [cell[self.figure] for cell in measured if self.figure in cell]
        return [
            *(f"{self}: not in the cell {named(cell)}" for cell in lacking),
            *(f"{self}: {one:g}" for one in found if not self.least <= one <= self.most),
        ]


@dataclass(frozen=True)
class GpuRow:
    """One row. ``module``: of ``measurements``; its ``main`` gets ``given`` after the report.

    ``minutes``: the most that it may take. ``gpus``: how many it needs; with ``cpu`` it runs on a
    machine without any, at a small size. ``packages``: those beside torch and transformers.
    ``may_exhaust``: it passes although some cells need more memory than the GPU has.
    """

    shows: str
    module: str
    minutes: float
    bounds: Sequence[Bound]
    gpus: int = 1
    cpu: bool = True
    packages: Sequence[str] = ()
    given: Sequence[str] = ()
    may_exhaust: bool = False

    def needs(self) -> str:
        """GPUs and packages, in words."""
        gpus = f"{self.gpus} GPU{'s' * (self.gpus > 1)}" + " or a CPU" * self.cpu
        return ", ".join([gpus, "torch", "transformers", *self.packages])

    def criterion(self) -> str:
        """When the row has passed, in words."""
        memory = "" if self.may_exhaust else " or ran out of memory"
        return "; ".join([f"no cell failed{memory}", *map(str, self.bounds)])

    def broken(self, cells: Sequence[Cell], device: str) -> list[str]:
        """Why the row has not passed with these cells; empty if it has."""
        fatal = ("failed",) if self.may_exhaust else ("failed", "out_of_memory")
        failed = [f"{named(cell)}: {cell[key]}" for cell in cells for key in fatal if key in cell]
        bounds = [bound for bound in self.bounds if device == "cuda" or not bound.gpu]
        return failed + [line for bound in bounds for line in bound.broken(cells)]


def named(cell: Cell) -> str:
    """The cell by its values."""
    return ", ".join(f"{key} {value}" for key, value in cell.items() if key not in REASONS)


def reason(cell: Cell) -> str:
    """Why a cell has no figures; empty if it has some."""
    found = (f"{key.replace('_', ' ')}: {cell[key]}" for key in REASONS if key in cell)
    return "; ".join(found)


def _rows() -> dict[str, GpuRow]:
    """Those of ``rows.yaml`` by name, the riskiest first."""
    text = files(__package__).joinpath("rows.yaml").read_text(encoding="utf-8")
    entries: dict[str, Any] = yaml.safe_load(text)["rows"]
    return {
        name: GpuRow(**{**entry, "bounds": [Bound(**one) for one in entry["bounds"]]})
        for name, entry in entries.items()
    }


ROWS = _rows()
