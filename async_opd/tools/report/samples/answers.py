"""The report's section of answers to prompts with images, from the newest evaluation."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import chain, islice, zip_longest
from typing import Any

from pydantic import TypeAdapter, ValidationError

from async_opd.core.row import Media
from async_opd.files.foreign import Place
from async_opd.files.json_lines import json_objects
from async_opd.grading.evaluation_files import EVALS
from async_opd.tools.report.page import Section, paragraphs, text
from async_opd.tools.report.recorded_run import RecordedRun
from async_opd.tools.report.samples.gallery import Gallery

SHOWN, CHARS = 8, 400
"""Answers, of the data sources by turns; characters of a prompt or a response."""
_STEP = re.compile(r"step_(\d{1,15})\.jsonl")


@dataclass(frozen=True)
class ImageAnswer:
    """An answer to a prompt with images, as a line of ``evals/`` has it."""

    uid: str
    data_source: str
    prompt: str
    response: str
    images: tuple[Media, ...]
    score: float | None = None


_ANSWER = TypeAdapter(ImageAnswer)


def answers_with_images(path: Place) -> Iterator[ImageAnswer]:
    """Those of a file of answers; lines that are none are left out. OSError."""
    for _, entry in json_objects(path):
        if entry is not None and entry.get("images"):
            answer = _answer(entry)
            if answer is not None:
                yield answer


def _answer(entry: dict[str, Any]) -> ImageAnswer | None:
    try:
        return _ANSWER.validate_python(entry)
    except ValidationError:
        return None


def answer_sections(run: RecordedRun, gallery: Gallery) -> list[Section]:
    """The section; none for a run whose newest evaluation has no images."""
    found = ((_STEP.fullmatch(path.name), path) for path in (run.folder / EVALS).entries())
    steps = {int(name[1]): path for name, path in found if name}
    if not steps:
        return []
    newest = max(steps)
    sources: defaultdict[str, list[ImageAnswer]] = defaultdict(list)
    for answer in answers_with_images(steps[newest]):
        if len(sources[answer.data_source]) < SHOWN:
            sources[answer.data_source].append(answer)
    turns = chain.from_iterable(zip_longest(*sources.values()))
    shown = list(islice((one for one in turns if one is not None), SHOWN))
    if not shown:
        return []
    cards = "".join(_card(one, gallery) for one in shown)
    about = f"Answers to prompts with images in the evaluation at step {newest}; evals/ has all."
    html = f"{paragraphs([about])}{cards}{paragraphs(gallery.notes(), 'soft')}"
    return [Section("answers", "Answers", html)]


def _card(one: ImageAnswer, gallery: Gallery) -> str:
    score = "not graded" if one.score is None else f"score {one.score:.3g}"
    known = f'<p class="soft">{text(one.data_source)}, {score}</p>'
    return (
        f'<article class="card answer"><h3>{text(one.uid)}</h3>{known}'
        f"{gallery.html(one.images, one.uid)}"
        f'<p class="soft">Prompt: {text(_cut(one.prompt))}</p>'
        f"<p>Response: {text(_cut(one.response))}</p></article>"
    )


def _cut(value: str) -> str:
    return value if len(value) <= CHARS else f"{value[:CHARS]} …"
