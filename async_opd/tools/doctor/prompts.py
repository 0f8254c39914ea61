"""Prompts as the models read them, and their lengths against the limits."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import chain, zip_longest
from typing import Any

import numpy as np

from async_opd.checks.preflight import Inputs
from async_opd.config.run_config import RunConfig
from async_opd.core.errors import RolloutFault
from async_opd.core.row import Row
from async_opd.core.samples import Prompt
from async_opd.data.prompts import to_prompt
from async_opd.data.teacher_prompts import prompts_as_read, teacher_readers
from async_opd.models.tokenizer import Text
from async_opd.pictures import ShownText
from async_opd.tools.doctor.finding import Finding

TOPIC = "lengths"
MEASURED = 2000
"""Prompts of each part of the data whose lengths are measured, chosen by ``seed``."""


@dataclass(frozen=True)
class RenderedPrompt:
    """A prompt as a model reads it; ``text`` is that of its tokens joined, special ones too.

    An image is ``<image 640x480>`` there.
    """

    uid: str
    data_source: str
    reader: str
    tokens: int
    text: str


def sampled(config: RunConfig, sources: Sequence[Sequence[Row]], count: int) -> list[Row]:
    """``count`` training rows, chosen by ``seed``: one of each data source in turn."""
    chosen, by_source = random.Random(config.seed), dict[str, list[Row]]()
    for row in chain.from_iterable(sources):
        by_source.setdefault(row.data_source, []).append(row)
    picked = [chosen.sample(rows, min(count, len(rows))) for _, rows in sorted(by_source.items())]
    turns = chain.from_iterable(zip_longest(*picked))
    return [row for row in turns if row is not None][:count]


def sampled_prompts(config: RunConfig, inputs: Inputs, text: Text, count: int) -> list[Prompt]:
    """The prompts of ``count`` training rows, without those that cannot be made or are too long."""
    prompts: list[Prompt] = []
    given: dict[str, Any] = {"limit": inputs.max_prompt_tokens, "sized": text.image_tokens}
    given["readers"] = teacher_readers(config, text)
    for row in sampled(config, inputs.checked, count):
        with suppress(RolloutFault):  # the findings of lengths and templates report it
            prompts.append(to_prompt(row, text.encode, config.teacher_of, **given))
    return prompts


def rendered(config: RunConfig, text: Text, rows: Sequence[Row]) -> list[RenderedPrompt]:
    """The rows' prompts as the student and their teachers read them; equal ones once."""
    found: dict[RenderedPrompt, None] = {}
    shows = ShownText.of(text, config.student.model)
    for row in rows:
        seen = prompts_as_read(config, text, row)
        equal = len(seen) > 1 and seen[0].ids == seen[1].ids
        for one in seen[:1] if equal else seen:
            reader = " and ".join(other.reader for other in seen) if equal else one.reader
            joined = shows.pieces(one.ids, one.pieces, row.images)
            prompt = RenderedPrompt(str(row.uid), row.data_source, reader, len(one.ids), joined)
            found[prompt] = None
    return list(found)


def lengths(config: RunConfig, text: Text, inputs: Inputs) -> Iterator[Finding]:
    """A line for each part of the data: tokens of prompts, and the share beyond the limit."""
    for part, sources, limit in (
        ("data.train", inputs.checked, inputs.max_prompt_tokens),
        ("data.eval", inputs.eval, inputs.max_eval_prompt_tokens),
    ):
        rows = list(chain.from_iterable(sources))
        if rows:
            yield _lengths(part, _tokens(config, text, rows), limit, len(rows))
    top = config.rollout.max_tokens
    yield Finding(TOPIC, "ok", f"responses: at most {top} tokens (rollout.max_tokens)")


def _tokens(config: RunConfig, text: Text, rows: list[Row]) -> list[int]:
    """Of each of at most MEASURED rows, the tokens of the longest prompt that a model reads."""
    some = random.Random(config.seed).sample(rows, min(MEASURED, len(rows)))
    return [max(len(one.ids) for one in prompts_as_read(config, text, row)) for row in some]


def _lengths(part: str, tokens: list[int], limit: int | None, rows: int) -> Finding:
    median, most = int(np.median(tokens)), max(tokens)
    found = f"{part}: {rows} prompts, median {median}, longest {most} tokens"
    found += f" (of {len(tokens)})" if len(tokens) < rows else ""
    if limit is None:
        return Finding(TOPIC, "ok", f"{found}; no limit")
    share = sum(one > limit for one in tokens) / len(tokens)
    remedy = "see data.overlong: filter, refuse or truncate_left" if share else ""
    found += f"; {share:.1%} over the limit of {limit}"
    return Finding(TOPIC, "warning" if share else "ok", found, remedy)
