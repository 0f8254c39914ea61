"""What can be wrong with the data: sources, graders, who teaches what, and lengths."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from async_opd.checks.findings import Findings
from async_opd.config.run_config import FileSource, ReasoningGymSource, RunConfig
from async_opd.core.row import PromptText, Row
from async_opd.data.prompts import filled
from async_opd.data.sources import SourceError, read_source
from async_opd.grading.graders import load_grader
from async_opd.grading.verifiers import REMEDY, evaluates
from async_opd.models.tokenizer import Text

MEDIA = {"image", "images", "audio", "audios", "video", "videos"}
"""Fields of rows that are more than text."""


@dataclass(frozen=True)
class _EncodedPrompt:
    """A prompt of a row, as one of the models sees it."""

    uid: str
    count: int
    largest: int

    @property
    def row(self) -> int:
        """Number of the row in its source, from 1."""
        return int(self.uid.rpartition(":")[2]) + 1


@dataclass(frozen=True)
class Room:
    """What the models hold: prompts of 1 to ``limit`` tokens, tokens below ``rows``.

    ``key`` is that of the config which bounds them: itself, or as what takes the rest of the
    models' positions. A tokenizer's ids may have
    gaps, and end beyond the rows of a model that has enough; its engine would die of one.
    """

    key: str
    limit: int
    rows: int | None

    def faults(self, prompts: Sequence[_EncodedPrompt]) -> Iterator[tuple[str, str]]:
        """Message and remedy."""
        foreign = [p for p in prompts if self.rows is not None and p.largest >= self.rows]
        if foreign:
            yield (
                f"{len(foreign)} prompts have tokens beyond the {self.rows} of the smallest model, "
                f"the first is row {foreign[0].row} with token {foreign[0].largest}",
                "mend the prompts, or resize the model's embeddings",
            )
        wrong = [prompt for prompt in prompts if not 1 <= prompt.count <= self.limit]
        if wrong:
            yield (
                f"{len(wrong)} prompts are empty or longer than {self.limit} tokens, the first is "
                f"row {wrong[0].row} with {wrong[0].count}",
                f"shorten or remove them, or {self._remedy}",
            )

    @property
    def _remedy(self) -> str:
        if self.key == "data.max_prompt_tokens":
            return f"raise {self.key}"
        return (
            f"lower {self.key}: prompt, response and one more token must fit the shortest model, "
            "or the max_model_len of its engine"
        )


@dataclass
class DataChecks:
    """Reads every source once. ``unreadable``: one of them had no rows."""

    config: RunConfig
    found: Findings
    unreadable: bool = False

    def grader(self, key: str, name: str) -> None:
        """The grader can be imported."""
        try:
            load_grader(name)
        except Exception as error:  # a user's module can raise anything while it is imported
            self.found.add(
                key,
                f"{name} cannot be loaded: {type(error).__name__}: {error}",
                "exact, math_verify, or module:function on PYTHONPATH",
            )

    def sources(self, part: str) -> list[list[Row]]:
        """Reads ``data.train`` or ``data.eval``."""
        entries = getattr(self.config.data, part)
        if part == "train" and not entries:
            self.found.add("data.train", "no source of prompts", "name a file")
        read: list[list[Row]] = []
        for index, source in enumerate(entries):
            rows: list[Row] = []
            try:
                rows = read_source(source, index, self.config.data)
            except SourceError as error:
                place = _name(source) + ("" if error.row is None else f", row {error.row}")
                remedy = "check the path" if "exist" in error.message else "mend the data"
                self.found.add(f"data.{part}", error.message, remedy, place)
            except ImportError as error:
                remedy = "pip install async-opd[data]"
                self.found.add(f"data.{part}", f"{_name(source)} needs {error.name}", remedy)
            self.unreadable |= not rows
            read.append(rows)
        return read

    def routes(self, train: Sequence[Row], evaluation: Sequence[Row]) -> None:
        """Every data source has one teacher, every teacher a data source."""
        claimed: dict[str, str] = {}
        for name, teacher in self.config.teachers.items():
            for source in teacher.sources if teacher.sources is not None else [name]:
                if source in claimed:
                    self.found.add(
                        f"teachers.{name}.sources",
                        f"{source!r} is {claimed[source]}'s already",
                        "a data source has one teacher",
                    )
                claimed.setdefault(source, name)
        found = {row.data_source for row in train}
        for source in sorted(found | {row.data_source for row in evaluation}):
            if source not in claimed:
                self.found.add(
                    "teachers",
                    f"no teacher for data source {source!r}",
                    f"add {source!r} to the sources of one of: {', '.join(self.config.teachers)}",
                )
        for name in self.config.teachers:
            own = {source for source, teacher in claimed.items() if teacher == name}
            if not own & found:
                self.found.add(
                    f"teachers.{name}",
                    f"no prompt goes to it: its sources are {sorted(own)}, data.train has "
                    f"{sorted(found)}",
                    f"set teachers.{name}.sources, or remove the teacher",
                )

    def media(self, part: str, rows: Sequence[Row]) -> None:
        """Rows are text: nothing would look at an image, and who answers would have to."""
        seen = [(row, name) for row in rows if (name := _medium(row)) is not None]
        if seen:
            row, name = seen[0]
            self.found.add(
                f"data.{part}",
                f"{len(seen)} rows have {name!r}, the first is {row.uid}: only text is supported "
                "yet, and the student would answer without it",
                "remove it from the data, or take other data",
            )

    def answers(self, part: str, rows: Sequence[Row], grader: str) -> None:
        """Rows to grade have an answer; a user's own grader and reasoning-gym may need none."""
        without = [r for r in rows if r.answer is None and r.task is None]
        if without and ":" not in grader:
            self.found.add(
                f"data.{part}",
                f"{len(without)} rows have no {self.config.data.answer!r}, the first is "
                f"{without[0].uid}: {grader} would grade every response 0",
                "add the answers, or name their field in data.answer",
            )

    def verifiers(self, part: str, rows: Sequence[Row]) -> None:
        """Rows to grade have no verifier that runs a response as code, unless that is allowed."""
        found = {row.task.name for row in rows if row.task is not None and evaluates(row.task.name)}
        if found and not self.config.grading.allow_eval:
            self.found.add(
                f"data.{part}",
                f"reasoning-gym's verifiers of {', '.join(sorted(found))} evaluate what the model "
                "wrote: a response can run code as you",
                REMEDY,
            )

    def prompts(self, part: str, sources: Sequence[Sequence[Row]], room: Room) -> None:
        """Every prompt can be tokenized and fits the models."""
        text = Text.of(self.config)
        for source, rows in zip(getattr(self.config.data, part), sources, strict=True):
            try:
                found = [self._prompt(row, text) for row in rows]
            except Exception as error:  # a chat template can raise anything
                self.found.add(
                    f"data.{part}",
                    f"a prompt cannot be tokenized: {type(error).__name__}: {error}",
                    "mend the prompt or the chat template, or set data.chat_template",
                    _name(source),
                )
                continue
            self._spelled(part, source, rows, text)
            prompts = [prompt for of_row in found for prompt in of_row]
            for message, remedy in room.faults(prompts):
                self.found.add(f"data.{part}", message, remedy, _name(source))

    def _spelled(
        self, part: str, source: FileSource | ReasoningGymSource, rows: Sequence[Row], text: Text
    ) -> None:
        """Notes how many prompts spell special tokens: their template may be applied already."""
        spelled = [(row, text.spelled(row.prompt)) for row in rows]
        found = [(row, token) for row, token in spelled if token is not None]
        if found:
            row, token = found[0]
            number = int(row.uid.rpartition(":")[2]) + 1
            self.found.notes.append(
                f"data.{part}: {len(found)} prompts of {_name(source)} spell special tokens, the "
                f"first is row {number} with {token!r}; they are read as text, unless "
                "data.special_tokens is parse"
            )

    def _prompt(self, row: Row, text: Text) -> list[_EncodedPrompt]:
        encoded = [text.encode(seen) for seen in self._seen(row)]
        return [_EncodedPrompt(row.uid, len(ids), max(ids, default=0)) for ids in encoded]

    def _seen(self, row: Row) -> list[PromptText]:
        """A row's prompt as the student sees it, and as its teacher does where that is another."""
        teacher = self.config.teacher_of(row.data_source)
        template = self.config.prompt_templates.get(teacher or "")
        return [row.prompt] if template is None else [row.prompt, filled(template, row)]


def _medium(row: Row) -> str | None:
    """The field, or the part of a chat message, that is an image, a sound or a film."""
    for name in sorted(MEDIA & row.fields.keys()):
        if row.fields[name] not in (None, "", [], {}):
            return name
    for message in row.prompt if isinstance(row.prompt, list) else ():
        content = message.get("content")
        for part in content if isinstance(content, list) else ():
            kind = part.get("type", "text") if isinstance(part, dict) else "text"
            if kind != "text":
                return str(kind)
    return None


def _name(source: FileSource | ReasoningGymSource) -> str:
    """What problems of a source are told to be in."""
    return source.path if isinstance(source, FileSource) else source.task
