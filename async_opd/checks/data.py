"""Checks of the data: sources, graders, routes to teachers, and lengths of prompts."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from functools import partial

from async_opd.checks.room import Room, Tally
from async_opd.config.run_config import RunConfig
from async_opd.config.sections.data import PromptSource
from async_opd.config.user_code import SOURCE_GROUP, UserCodeError, find_user_code
from async_opd.core.errors import Findings, SourceError, in_words
from async_opd.core.row import Media, Row
from async_opd.data.mixture import passes
from async_opd.data.prompts import added
from async_opd.data.stored_rows import KeptRows, read_source
from async_opd.data.streamed_rows import StreamedRows, number_of
from async_opd.data.teacher_prompts import Reader, teacher_readers
from async_opd.grading.accuracy import metric_names
from async_opd.grading.graders import (
    REMEDY,
    evaluates,
    is_function,
)
from async_opd.models.model_files import is_vision_model
from async_opd.models.tokenizer import Text
from async_opd.queue.sizes import in_mib

MOST_NAMED = 5


@dataclass
class _Part:
    """Facts about the rows of a part of the data, collected while they are read.

    Rows with ``images`` are ``pictured``; ``shown`` are their data sources. Rows without an answer
    are ``unanswered``; those of them that no task grades are ``ungradable``. ``unread``: a source
    gave no rows.
    """

    routes: set[str] = field(default_factory=set)
    pictured: Tally = field(default_factory=Tally)
    images: set[Media] = field(default_factory=set)
    shown: set[str] = field(default_factory=set)
    unanswered: Tally = field(default_factory=Tally)
    ungradable: Tally = field(default_factory=Tally)
    tasks: set[str] = field(default_factory=set)
    streamed: bool = False
    unread: bool = False

    def inspect(self, row: Row) -> None:
        """Adds the facts about a row."""
        self.routes.add(row.data_source)
        if row.images:
            self.pictured.add(row.uid)
            self.images.update(row.images)
            self.shown.add(row.data_source)
        if row.task is not None:
            self.tasks.add(row.task.name)
        if row.answer is None:
            self.unanswered.add(row.uid)
            if row.task is None:
                self.ungradable.add(row.uid)


Rows = Sequence[Row] | StreamedRows


@dataclass
class DataChecks:
    """Reads every source once. ``unreadable``: at least one source gave no rows.

    ``load``: user code is imported, and not only found. ``renders``: chat templates can be read, so
    that prompts can be tokenized. ``vision``: the student's image processor may be loaded.
    """

    config: RunConfig
    found: Findings
    load: bool = False
    unreadable: bool = False
    renders: bool = True
    vision: bool = True
    parts: dict[str, _Part] = field(
        default_factory=lambda: {part: _Part() for part in ("train", "eval", "cold_start")}
    )

    def without_images(self) -> None:
        """Checks that no row has images, in a run with an environment."""
        if self.config.environment is None:
            return
        for part in ("train", "eval"):
            pictured = self.parts[part].pictured
            if pictured.count:
                message = (
                    f"{pictured.count} rows have images, the first is {pictured.first}: episodes "
                    "of several turns are of text"
                )
                self.found.add(f"data.{part}", message, "leave these rows out, or environment")

    def best_metric(self) -> None:
        """Checks that evaluations have what ``checkpoint.keep_best`` compares."""
        metric, sources = self.config.checkpoint.keep_best, sorted(self.parts["eval"].routes)
        values = [*metric_names(self.config.eval.n), "response_tokens", "truncated"]
        values += ["success", "turns", "tool_calls"] * (self.config.environment is not None)
        known = [f"eval/{source}/{value}" for source in sources for value in values]
        unread = self.parts["eval"].unread  # its sources have other names, perhaps this one
        if metric is None or unread or not sources:
            return
        if not any(fnmatchcase(one, metric) for one in known):
            have = ", ".join(f"eval/{source}/accuracy" for source in sources)
            self.found.add(
                "checkpoint.keep_best",
                f"no metric of data.eval matches {metric}",
                f"one of {have}, or eval/*/accuracy",
            )

    def sources(self, part: str) -> list[Rows]:
        """Reads all sources of a part; of streamed sources only the first window."""
        entries = self._entries(part)
        if part == "train" and not entries:
            self.found.add("data.train", "no source of prompts", "name a file")
        return self._sources(part, key_of(part), entries)

    def _entries(self, part: str) -> Sequence[PromptSource]:
        """The sources of a part; none of ``cold_start`` without such a section."""
        if part == "cold_start":
            return [] if self.config.cold_start is None else self.config.cold_start.data
        found: list[PromptSource] = getattr(self.config.data, part)
        return found

    def _sources(self, part: str, key: str, entries: Sequence[PromptSource]) -> list[Rows]:
        read: list[Rows] = []
        for index, source in enumerate(entries):
            rows: Rows = []
            try:
                rows = [] if source.absent else self._read(part, key, source, index)
            except UserCodeError as error:
                self.found.add(key, str(error), "put its module on PYTHONPATH", source.label)
            except SourceError as error:
                self._unreadable(key, source.label, error)
            except ImportError as error:
                extra = "vision" if error.name == "PIL" else "data"
                remedy = f"pip install 'async-opd[{extra}]'"
                self.found.add(key, f"{source.label} needs {error.name}", remedy)
            self.unreadable |= not checked(rows)
            self.parts[part].unread |= not checked(rows)
            read.append(rows)
        return read

    def _unreadable(self, key: str, label: str, error: SourceError) -> None:
        """Adds the fault of a source, or those of its first wrong rows, each with all its rows."""
        if error.row is None:
            usual = "check the path" if "exist" in error.message else "write another file"
            self.found.add(key, error.message, error.remedy or usual, label)
            return
        faults = dict[tuple[str, str], list[str]]()
        for one in (error, *error.others):
            faults.setdefault((one.message, one.remedy), []).append(str(one.row))
        for (message, remedy), at in faults.items():
            place = f"{label}, row{'s' * (len(at) > 1)} {', '.join(at)}"
            self.found.add(key, message, remedy or "correct the row, or remove it", place)

    def _read(self, part: str, key: str, source: PromptSource, index: int) -> Rows:
        facts = self.parts[part]
        if source.stream and part == "eval":
            raise SourceError(source.label, "is streamed, and an evaluation takes all of its rows")
        if source.kind == "user" and not self.load:
            find_user_code(source.label, SOURCE_GROUP)
            how = "is not called: its rows are checked by async_opd check --load"
            self.found.notes.append(f"{key}: {source.label} {how}")
            return []
        if not source.stream:
            return read_source(source, index, self.config.data, facts.inspect)
        rows = StreamedRows(partial(source.rows, index, self.config.data), source.window)
        for row in checked(rows):
            facts.inspect(row)
        if not rows.head:
            raise SourceError(source.label, "has no rows")
        facts.streamed = True
        self.found.notes.append(
            f"{key}: {source.label} is streamed: its first {len(rows.head)} rows are checked"
        )
        return rows

    def routes(self) -> None:
        """Checks that each data source has one teacher, and each teacher a data source."""
        lone, trained = self.config.lone_teacher, self.parts["train"].routes
        if lone is not None:
            others = ", ".join(sorted(trained - {lone})[:MOST_NAMED])
            if lone in trained and others:
                why = f"the only teacher scores all rows, those of {others} too"
                self.found.notes.append(f"teachers.{lone}: {why}, unless its sources are set")
            return
        teacher_of: dict[str, str] = {}
        twice = False
        for name, teacher in self.config.teachers.items():
            for source in teacher.sources if teacher.sources is not None else [name]:
                if source in teacher_of:
                    message = f"{source!r} is a source of teacher {teacher_of[source]} already"
                    remedy = "name each data source at one teacher only"
                    self.found.add(f"teachers.{name}.sources", message, remedy)
                    twice = True
                teacher_of.setdefault(source, name)
        if twice:
            return
        train = self.parts["train"]
        unknown = sorted((train.routes | self.parts["eval"].routes) - teacher_of.keys())
        for source in unknown:
            remedy = f"add it to the sources of one of: {', '.join(self.config.teachers)}"
            self.found.add("teachers", f"no teacher for data source {source!r}", remedy)
        if unknown:  # a teacher without prompts may be the one that is meant
            return
        for name in self.config.teachers:
            own = {source for source, teacher in teacher_of.items() if teacher == name}
            if not own & train.routes and not train.streamed:
                has = f"its sources are {sorted(own)}, data.train has {sorted(train.routes)}"
                remedy = f"set teachers.{name}.sources, or remove the teacher"
                self.found.add(f"teachers.{name}", f"gets no prompts: {has}", remedy)

    def images(self, part: str) -> None:
        """Notes the images of a part's rows; none may be in a cold start."""
        key, pictured, images = key_of(part), self.parts[part].pictured, self.parts[part].images
        if not pictured.count:
            return
        largest = max(images, key=lambda one: one.width * one.height)
        size = in_mib(sum(one.nbytes for one in images))
        shown = (
            f"{pictured.count} rows have images, the first is {pictured.first} ({len(images)} "
            f"different ones of {size}, the largest of {largest.width} x {largest.height} pixels)"
        )
        if part == "cold_start" or (part == "train" and self._starts_cold_with_train):
            message = f"{shown}: given answers pass no engine, which expands prompts with images"
            self.found.add("cold_start", message, "name other rows in cold_start.data")
        else:
            self.found.notes.append(f"{key}: {shown}")

    @property
    def _starts_cold_with_train(self) -> bool:
        return self.config.cold_start is not None and not self.config.cold_start.data

    def answers(self, part: str, grader: str) -> None:
        """Checks that graded rows have answers, unless their grader needs none."""
        without = self.parts[part].ungradable
        if without.count and not is_function(grader):
            self.found.add(
                f"data.{part}",
                f"{without.count} rows have no {self.config.data.answer!r}, the first is "
                f"{without.first}: {grader} would grade every response 0",
                "add the answers, or name their field in data.answer",
            )

    def verifiers(self, part: str) -> None:
        """Checks that no verifier runs a response as code, unless ``grading.allow_eval``."""
        tasks = sorted(filter(evaluates, self.parts[part].tasks))
        if tasks and not self.config.grading.allow_eval:
            self.found.add(
                f"data.{part}",
                f"reasoning-gym's verifiers of {', '.join(tasks)} evaluate responses as Python: "
                "a response can run code as you",
                REMEDY,
            )

    def sizes(self) -> None:
        """Checks that sources whose number of rows matters are not streamed."""
        data, train = self.config.data, self.config.train
        streamed = [source.label for source in data.train if source.stream]
        for key, value in {
            "data.size_temperature": data.size_temperature,
            "train.epochs": train.epochs,
        }.items():
            if value is not None and streamed:
                message = f"found {value}, but {streamed[0]} is streamed: its size is not known"
                self.found.add(key, message, "remove it, or do not stream the source")

    def passes(self, sources: list[Rows]) -> None:
        """Notes how often ``train.epochs`` takes the rows of each source, unless it is as often."""
        entries, epochs = self.config.data.train, self.config.train.epochs
        often = passes(self.config, sources) if epochs and all(map(checked, sources)) else []
        if often and max(often) > 1.001 * min(often):
            named = zip(entries, often, strict=True)
            each = ", ".join(f"{source.label} {times:.3g} times" for source, times in named)
            self.found.notes.append(
                f"train.epochs: found {epochs:g}, but sources are mixed by weight, so that rows "
                f"come as often as: {each}; data.size_temperature: 1 takes all equally often"
            )

    def prompts(self, part: str, sources: list[Rows], room: Room) -> None:
        """Checks that each prompt can be tokenized and fits the models.

        With ``data.overlong: filter`` rows with longer prompts are taken out of ``sources``.
        """
        text, key = Text.of(self.config), key_of(part)
        for at, source in enumerate(self._entries(part)):
            rows, spelled, long = sources[at], Tally(), set[str]()
            if not checked(rows):
                continue
            try:
                readers = self._readers(part, text)
                encoded = self._encoded(checked(rows), text, spelled, readers)
                faults = list(room.faults(encoded, long))
            except Exception as error:  # a chat template can raise anything
                message = f"a prompt cannot be tokenized: {in_words(error)}"
                remedy = "correct the prompt, or set student.chat_template_file"
                self.found.add(key, message, remedy, source.label)
                continue
            if spelled.count:
                self.found.notes.append(
                    f"{key}: {spelled.count} prompts of {source.label} spell special tokens, "
                    f"the first is {spelled.first}; they are read as text, unless "
                    "data.special_tokens is parse"
                )
            for message, remedy in faults:
                self.found.add(key, message, remedy, source.label)
            if room.overlong == "filter":
                sources[at] = self._fitting(rows, text, readers, room, long)
                if not checked(sources[at]):
                    self.found.add(key, "data.overlong leaves no row", room.remedy(), source.label)
            if long:
                done = "left out" if room.overlong == "filter" else "cut off at their beginning"
                self.found.notes.append(
                    f"{key}: {len(long)} of {len(checked(rows))} prompts of {source.label} are "
                    f"longer than {room.limit} tokens, and are {done} (data.overlong)"
                )

    def _fitting(
        self, rows: Rows, text: Text, readers: Mapping[str, Reader], room: Room, long: Set[str]
    ) -> Rows:
        """The rows without those with longer prompts; ``long`` are those of the rows checked."""
        if not isinstance(rows, StreamedRows):
            return KeptRows(rows, [at for at, row in enumerate(rows) if row.uid not in long])

        def fits(row: Row) -> bool:
            try:
                encoded = self._encoded([row], text, Tally(), readers)
                return all(len(ids) <= room.limit for _, ids in encoded)
            except Exception:  # the row becomes a dead letter, with the reason
                return True

        return rows.only(fits)

    def _readers(self, part: str, text: Text) -> Mapping[str, Reader]:
        """Teachers that read other prompts; none where no teacher reads any."""
        start = self.config.cold_start
        unread = part == "cold_start" and start is not None and start.answers == "given"
        return {} if unread else teacher_readers(self.config, text)

    def _encoded(
        self, rows: Iterable[Row], text: Text, spelled: Tally, readers: Mapping[str, Reader]
    ) -> Iterator[tuple[Row, list[int]]]:
        """Token ids of each row's prompt, and of its teacher's if the teacher reads another.

        ``spelled`` counts prompts that spell special tokens, as data does whose chat template is
        applied already. In place of an image are as many placeholders as it has tokens at most.
        Rows with images are left out if the student reads text only: another check reports that.
        """
        for row in rows:
            if row.images and not (self.vision and is_vision_model(self.config.student.model)):
                continue
            token = text.spelled(row.prompt)
            if token is not None:
                spelled.add(f"row {number_of(row) + 1} with {token!r}")
            read = readers.get(self.config.teacher_of(row.data_source) or "")
            try:
                prompts = [text.encode(row.prompt), *([] if read is None else [read(row)])]
                more = [text.placeholder or 0] * (added(row, text.image_tokens))
            except ValueError as error:
                if not row.images:
                    raise
                raise ValueError(f"row {number_of(row) + 1}: {error}") from error
            yield from ((row, ids + more) for ids in prompts)


def key_of(part: str) -> str:
    """The config key of a part's sources."""
    return "cold_start.data" if part == "cold_start" else f"data.{part}"


def checked(rows: Rows) -> Sequence[Row]:
    """The rows that are checked before a run. SourceError for a bad row of a streamed source."""
    if not isinstance(rows, StreamedRows):
        return rows
    for entry in rows.head:
        if isinstance(entry, SourceError):
            raise entry
    return [entry for entry in rows.head if isinstance(entry, Row)]
