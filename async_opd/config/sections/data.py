"""The sections ``data``, sources of prompts and fields of their rows, and ``cold_start``."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator, Sequence
from datetime import date
from functools import reduce
from operator import or_
from pkgutil import resolve_name
from typing import TYPE_CHECKING, Annotated, Any, Literal, Self

from pydantic import Field, field_validator, model_validator

from async_opd.config.paths import HUB, hub_source_of
from async_opd.config.registry import SOURCES
from async_opd.config.sections.section import Count, Name, Section
from async_opd.core.errors import SourceError
from async_opd.core.row import AnswerIn, Row


class PromptSource(Section):
    """A source of prompts: its keys in the config, and its rows. Each kind is a subclass."""

    kind: str
    weight: float = Field(default=1.0, gt=0)
    """Share of this source in the stream, relative to the other sources' weights."""
    from_step: Count = 1
    """First step that has prompts of this source; only in ``data.train``."""
    until_step: Count | None = None
    """Last step that has prompts of this source; by default the last of all."""
    stream: bool = False
    """Reads rows only when they are needed: the first ``window`` rows are checked before the run,
    and rows are shuffled within a window. Otherwise all rows are read and checked first, and copied
    to a temporary file."""
    window: Count = 2048
    """Rows of a streamed source that are in memory, and shuffled with each other."""

    @model_validator(mode="after")
    def _begins_before_it_ends(self) -> Self:
        if self.until_step is not None and self.until_step < self.from_step:
            raise ValueError(f"until_step of at least from_step ({self.from_step})")
        return self

    def is_active(self, step: int) -> bool:
        """Whether the step has prompts of this source."""
        return self.from_step <= step and (self.until_step is None or step <= self.until_step)

    @property
    def label(self) -> str:
        """The source's name in messages."""
        return self.kind

    @property
    def absent(self) -> bool:
        """Whether its rows are not on this machine, and only a run may download them."""
        return False

    @abstractmethod
    def rows(self, index: int, data: DataConfig, start: int = 0) -> Iterator[Row | SourceError]:
        """Yields the rows from position ``start`` on, the same ones in every call.

        ``index`` is the source's position in ``data.train``; uids are ``<index>:<number>``, where
        numbers grow, and none is below its row's position. A SourceError, whose ``row`` is the
        number + 1, is yielded in place of a bad row. One is raised if the source as a whole cannot
        be read.
        """


if TYPE_CHECKING:
    Source = PromptSource
else:
    kinds = map(resolve_name, SOURCES.values())
    Source = Annotated[reduce(or_, kinds), Field(discriminator="kind")]


class DataConfig(Section):
    """Sources of prompts, and the fields of their rows."""

    train: list[Source]
    """Sources of the prompts that are trained on, mixed by weight. A bare string is a file, or
    with ``hf:`` a data set of the hub: ``hf:ID[:CONFIG][:SPLIT]``. One source needs no list."""
    eval: list[Source] = Field(default=[])
    """Sources of the prompts that are evaluated on; none means no evaluation."""
    prompt: Name = "prompt"
    """Field with the prompt: a string, or a list of chat messages. Here and in the next keys dots
    lead to fields inside of others: ``extra_info.question``."""
    answer: Name = "answer"
    """Field with the reference answer, which graders compare responses with, such as
    ``reward_model.ground_truth`` in verl's files."""
    answer_in: AnswerIn = "whole"
    """The part of that field which is the answer: ``whole``, what follows its last ``####`` (as in
    GSM8K), or what is ``boxed`` in its last ``\\boxed{}``. A row without it is refused."""
    images: Name = Field(default="images", min_length=1)
    """Field with a prompt's image, or a list of them: encoded bytes, a path, a data URL, or a
    struct of ``bytes`` and ``path``, as the hub's ``Image`` columns are. See docs/data.md."""
    image_placeholder: str = "<image>"
    """Text in whose place an image stands, in prompts of rows that have that field; parts of type
    ``image`` in messages are places too. Empty: images come before the first user message."""
    max_image_pixels: Count = 1 << 25
    """Most pixels of an image (width x height); a row with a larger one is refused."""
    max_images: Count = 8
    """Most images of a row; one with more is refused. Engines of vision models take as many in a
    prompt."""
    image_cache_mib: Count = 256
    """Maximum size in MiB of the encoded images that each replica and each rank of the trainer
    keeps after it has fetched them from the queue; the least recently used go first."""
    route_by: Name = "data_source"
    """Field that routes a row to the teacher whose ``sources`` contain its value."""
    chat_template: Literal["auto", "always", "never"] = "auto"
    """Whether prompts go through the tokenizer's chat template; ``auto``: if it has one."""
    template_date: str | None = None
    """The date, as 2026-11-22, that chat templates write into prompts (``strftime_now``). By
    default it is that of the run's start, also after a resume on another day."""
    special_tokens: Literal["text", "parse"] = "text"
    """Special tokens that a prompt spells (``<|im_end|>``): ``text`` reads them as any other text,
    so that a row cannot forge the roles of a chat; ``parse`` reads them as tokens, for data whose
    chat template is applied already."""
    max_prompt_tokens: Count | None = None
    """Most tokens of a prompt; by default the positions that the model has left beside the longest
    response."""
    overlong: Literal["refuse", "filter", "truncate_left"] = "refuse"
    """The treatment of longer prompts: the run is refused (a streamed row that was not checked is
    a dead letter), such rows are left out, or their first tokens are cut off. ``run.log`` has their
    number."""
    size_temperature: float | None = Field(default=None, gt=0)
    """T: weights of ``train`` are multiplied by (rows of the source)^(1/T). 1 mixes in proportion
    to the sizes, larger values more equally; by default sizes do not matter."""
    shuffle: bool = True
    """Reorders the rows of each source in every epoch, by the seed."""

    @field_validator("template_date")
    @classmethod
    def _is_a_date(cls, value: str | None) -> str | None:
        if value is not None and date.fromisoformat(value).isoformat() != value:
            raise ValueError("expected a date as 2026-11-22")
        return value

    @model_validator(mode="before")
    @classmethod
    def _strings_are_files(cls, values: Any) -> Any:
        return as_sources(values, "train", "eval") if isinstance(values, dict) else values


class ColdStartConfig(Section):
    """Supervised steps on whole answers, after which distillation begins with a new optimizer.

    For a student that does not answer in the teachers' form yet: on-policy distillation improves
    what it samples, and cannot teach what it never samples. See docs/objectives.md.
    """

    steps: Count
    """Optimizer steps, each on ``train.batch_size`` answers, with the cross entropy of their
    tokens: a mean over the tokens of the batch."""
    answers: Literal["given", "teacher"] = "given"
    """The rows' own answers (``data.answer``), or what each row's teacher answers to its prompt.
    Answers beyond ``rollout.max_tokens`` are cut off."""
    data: list[Source] = Field(default=[])
    """Sources of the rows, as in ``data.train``; by default those of ``data.train``."""
    lr: float | None = Field(default=None, gt=0, le=1)
    """Learning rate; by default ``train.lr``."""
    warmup_steps: int = Field(default=0, ge=0)
    """Steps over which the learning rate rises linearly from 0; then it is constant."""
    temperature: float = Field(default=1.0, ge=0, le=2)
    """Sampling temperature of the teachers' answers; 0 is greedy."""

    @model_validator(mode="before")
    @classmethod
    def _strings_are_files(cls, values: object) -> object:
        return as_sources(values, "data") if isinstance(values, dict) else values


def as_sources(values: dict[Any, Any], *keys: str) -> dict[Any, Any]:
    """The values with a list of sources at each of these keys.

    One source needs no list, and a bare string is a file.
    """
    values = dict(values)
    for key in keys:
        if isinstance(values.get(key), str | dict):
            values[key] = [values[key]]
        if isinstance(values.get(key), list):
            values[key] = [_as_source(entry) for entry in values[key]]
    return values


def _as_source(entry: Any) -> Any:
    if isinstance(entry, str) and entry.startswith(HUB):
        return hub_source_of(entry.removeprefix(HUB))
    if isinstance(entry, str):
        return {"kind": "file", "path": entry}
    if isinstance(entry, dict) and "kind" not in entry:
        return {"kind": "file", **entry}
    return entry


def beginnings(sources: Sequence[PromptSource]) -> list[int]:
    """The steps at which sources begin, or are over, in order; the first step is one of them."""
    over = {source.until_step + 1 for source in sources if source.until_step is not None}
    return sorted({1, *(source.from_step for source in sources)} | over)
