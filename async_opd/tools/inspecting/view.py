"""Recorded tokens on a terminal: an overview by teacher, samples as a table, a sample in full.

Red tokens have a large loss, or are more probable for the student than for the teacher; blue ones
are more probable for the teacher.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, TextIO

from rich.table import Table
from rich.text import Text

from async_opd.config.run_config import RunConfig
from async_opd.config.sections.teachers import TeacherConfig
from async_opd.core.printable import on_one_line
from async_opd.core.row import Media
from async_opd.microscope import SampleRecord, records
from async_opd.observability.terminal import table_terminal
from async_opd.pictures import MEDIA, thumbnail_file, titled
from async_opd.tools.report.recorded_run import RecordedRun
from async_opd.tools.report.sample_status import sample_status
from async_opd.tools.report.worst import By, alternatives, by_teacher, levels, ranked, worst_token

if TYPE_CHECKING:
    from rich.console import Console

RED = ("", "on #4a1f1c", "on #70261f", "on #9a2d23", "bold white on #c23426")
BLUE = ("", "on #16304d", "on #1b4573", "on #205a99", "bold white on #2670bf")
"""Styles by shade: of values above 0, and below."""
UID = "uid"
"""The column of texts that the command takes as an argument."""
TOP = 3
"""The most probable tokens of a side in the table."""


@dataclass
class View:
    """Prints on a terminal, or ``file``. ``by`` colours tokens and chooses those of the table."""

    run: RecordedRun
    by: By
    rows: int
    file: TextIO | None = None
    terminal: Console = field(init=False)

    def __post_init__(self) -> None:
        self.terminal = table_terminal(self.file)

    def lines(self, found: Iterable[str]) -> None:
        """Prints each line."""
        for line in found:
            self.terminal.print(Text(on_one_line(line)), soft_wrap=True)

    def overview(self, steps: Sequence[int]) -> None:
        """A row for each teacher, with means over its recorded tokens, and what is not there."""
        found = by_teacher(records(self.run.folder))
        columns = ("teacher", "samples", "tokens", "loss", "gap", "first gap", "stale", "clamped")
        rows = [
            (
                name,
                str(one.samples),
                str(one.tokens),
                _number(one.loss / max(one.tokens, 1)),
                _number(one.gap / max(one.tokens, 1)),
                _number(one.first / max(one.samples, 1)),
                str(one.oldest),
                f"{one.clamps / max(one.tokens, 1):.1%}",
            )
            for name, one in found.items()
        ]
        self._table("recorded tokens by teacher: means in nats", columns, rows)
        self.lines(
            [
                f"{len(steps)} steps from {steps[0]} to {steps[-1]}; first gap: of the first "
                "token of a response; stale: the oldest token, in weight versions",
                *(f"teacher {name}: {_template(self.run.config, name)}" for name in found),
                *self._not_kept(),
            ]
        )

    def _not_kept(self) -> Iterable[str]:
        for key, why in (("removed", "no room in max_mib"), ("lost", "not written, see run.log")):
            counts = self.run.series(f"microscope/{key}")
            if counts and counts[-1][1]:
                yield f"not kept: {counts[-1][1]:g} samples ({why})"

    def samples(self, title: str, found: Sequence[SampleRecord]) -> None:
        """A row for each sample, with its worst token."""
        columns = (
            *(UID, "step", "teacher", "tokens", "stale", "loss", "gap"),
            *("worst token", "its loss", "its gap", "clamps"),
        )
        self._table(title, columns, [self._sample_row(one) for one in found[: self.rows]])

    def _sample_row(self, one: SampleRecord) -> tuple[str, ...]:
        own = (one.uid, str(one.step), one.teacher, str(len(one)), str(one.staleness))
        if not len(one):
            return (*own, *[""] * 6)
        _, row = worst_token(one, self.by)
        means = (_number(float(one.loss.mean())), _number(float(one.gap.mean())))
        place = f"{one['position'][row]} {one.text(one['token'][row])!r}"
        worst = (place, _number(one.loss[row]), _number(one.gap[row]))
        return (*own, *means, *worst, " ".join(one.clamps(row)))

    def sample(self, one: SampleRecord) -> None:
        """All that is known of a sample: its status, its text in colours, a table of tokens."""
        versions = sorted({int(version) for version in one["version"]})
        spans = f"sampled by versions {versions[0]} to {versions[-1]}" if versions else "no tokens"
        facts = {
            "weight": one.weight,
            "reward": one.reward,
            "advantage": one.advantage,
            "reward weight": one.reward_weight or None,
        }
        measured = ", ".join(
            f"{name} {value:.6g}" for name, value in facts.items() if value is not None
        )
        self.lines(
            [
                "",
                f"sample   {one.uid}  ({one.data_source}, teacher {one.teacher})",
                f"status   {sample_status(self.run, [one.uid])[one.uid]}",
                f"step     {one.step}, trained by version {one.version}; {spans}: "
                f"stale by {one.staleness}",
                f"tokens   {one.response_tokens}, finished by {one.finish_reason}; {measured}",
                f"teacher  {_template(self.run.config, one.teacher)}",
                *([f"skipped  {one.skipped}"] if one.skipped else []),
                *(f"image    {self._image(image)}" for image in one.images),
                f"prompt   {one.prompt}",
            ]
        )
        shades = levels(one, self.by)
        for title, rows in one.by_turn():
            self.lines([title] if title else [])
            text = Text("response ")
            for row in rows:
                style = RED[shades[row]] if shades[row] >= 0 else BLUE[-shades[row]]
                text.append(on_one_line(one.text(one["token"][row])), style)
            self.terminal.print(text)
        self._tokens(one)

    def _image(self, image: Media) -> str:
        path = thumbnail_file(self.run.folder, image.sha256)
        file = "no thumbnail" if path is None else f"{MEDIA}/{path.name}"
        return f"{titled(image)}, {image.nbytes} bytes, sha256 {image.sha256}: {file}"

    def _tokens(self, one: SampleRecord) -> None:
        shown = ranked(one, self.by, self.rows)
        columns = (
            *("at", "token", "version", "log μ", "log q", "log p", "gap", "loss", "q/μ"),
            *("clamps", "student: q", "support: p q"),
        )
        rows = [
            (
                str(one["position"][row]),
                repr(one.text(one["token"][row])),
                str(one["version"][row]),
                _number(one["rollout_logprob"][row]),
                _number(one["student_logprob"][row]),
                _number(one["teacher_logprob"][row]),
                _number(one.gap[row]),
                _number(one.loss[row]),
                _number(one["importance"][row]),
                " ".join(one.clamps(row)),
                _shares(one, row, "student"),
                _shares(one, row, "support"),
            )
            for row in shown
        ]
        of = f"{len(shown)} of {len(one)} tokens, the worst by {self.by}; nats"
        self._table(of, columns, rows)

    def _table(self, title: str, columns: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
        cells = [[on_one_line(cell) for cell in row] for row in rows]
        table = Table(title=title)
        for at, name in enumerate(columns):
            longest = max((len(row[at]) for row in cells), default=0) if name == UID else None
            table.add_column(name, overflow="fold", no_wrap=name == UID, min_width=longest)
        for row in cells:
            table.add_row(*map(Text, row))
        self.terminal.print(table, crop=False)


def _shares(one: SampleRecord, row: int, side: str) -> str:
    """The most probable tokens with their probabilities."""
    found = []
    for token, theirs, ours in alternatives(one, row, side, TOP):
        shares = [f"{math.exp(value):.0%}" for value in (theirs, ours) if isinstance(value, float)]
        found.append(f"{token!r} {' '.join(shares)}")
    return ", ".join(found)


def _number(value: float) -> str:
    return f"{float(value):.3g}"


def _template(config: RunConfig, name: str) -> str:
    """A teacher's tokens beside the student's."""
    teacher: TeacherConfig | None = config.teachers.get(name)
    if teacher is None:
        return "not in config.yaml"
    template = teacher.prompt_template
    reads = "the student's prompt" if template is None else f"prompt_template {template!r}"
    return f"{config.teacher_model(name)}, reads {reads}"
