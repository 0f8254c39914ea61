"""The ``data`` section: sources of prompts, and the fields of their rows."""

from __future__ import annotations

from functools import reduce
from operator import or_
from pkgutil import resolve_name
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import Field, PositiveInt, model_validator

from async_opd.config.registry import SOURCES, PromptSource
from async_opd.config.section import Section

if TYPE_CHECKING:
    Source = PromptSource
else:
    kinds = map(resolve_name, SOURCES.values())
    Source = Annotated[reduce(or_, kinds), Field(discriminator="kind")]


class DataConfig(Section):
    """Sources of prompts, and the fields of their rows."""

    train: list[Source]
    """Sources of the prompts that are trained on, mixed by weight. A bare string is a file."""
    eval: list[Source] = Field(default=[])
    """Sources of the prompts that are evaluated on; none means no evaluation."""
    prompt: str = "prompt"
    """Field with the prompt: a string, or a list of chat messages."""
    answer: str = "answer"
    """Field with the reference answer, which graders compare responses with."""
    route_by: str = "data_source"
    """Field that routes a row to the teacher whose ``sources`` contain its value."""
    chat_template: Literal["auto", "always", "never"] = "auto"
    """Whether prompts go through the tokenizer's chat template; ``auto``: if it has one."""
    special_tokens: Literal["text", "parse"] = "text"
    """Special tokens that a prompt spells (``<|im_end|>``): ``text`` reads them as any other text,
    so that a row cannot forge the roles of a chat; ``parse`` reads them as tokens, for data whose
    chat template is applied already."""
    max_prompt_tokens: PositiveInt | None = None
    """Longer prompts are refused; by default the positions that the model has left beside the
    longest response."""
    shuffle: bool = True
    """Reorders the rows of each source in every epoch, by the seed."""

    @model_validator(mode="before")
    @classmethod
    def _strings_are_files(cls, values: Any) -> Any:
        if isinstance(values, dict):
            values = dict(values)
            for key in ("train", "eval"):
                if isinstance(values.get(key), str):
                    values[key] = [values[key]]
                if isinstance(values.get(key), list):
                    values[key] = [_as_source(entry) for entry in values[key]]
        return values


def _as_source(entry: Any) -> Any:
    if isinstance(entry, str):
        return {"kind": "file", "path": entry}
    if isinstance(entry, dict) and "kind" not in entry:
        return {"kind": "file", **entry}
    return entry
