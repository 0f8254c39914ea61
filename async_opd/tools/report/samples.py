"""The report's sections of samples: answers to prompts with images, and recorded tokens.

Answers are those of the newest evaluation; their images are thumbnails as data URLs, of bounded
size in all. Of recorded tokens it shows a few responses, each token coloured by loss or gap. The
values of a token, and the most probable tokens of both sides, are in the page's JSON; page.js shows
those of the token under the pointer or with the focus, which arrow keys move.
"""

from __future__ import annotations

import base64
import math
import re
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, islice, zip_longest
from typing import Any

from pydantic import TypeAdapter, ValidationError

from async_opd.core.row import Media
from async_opd.files.foreign import Place
from async_opd.files.lines import json_objects
from async_opd.grading.evaluation_files import EVALS
from async_opd.microscope import MICROSCOPE, SampleRecord, files, records
from async_opd.pictures import read_thumbnail, titled
from async_opd.tools.report.page import Section, inert, paragraphs, text
from async_opd.tools.report.recorded_run import RecordedRun
from async_opd.tools.report.sample_status import sample_status
from async_opd.tools.report.worst import By, alternatives, levels, worst

SHOWN, CHARS = 8, 400
"""Answers, of the data sources by turns; characters of a prompt or a response."""
_STEP = re.compile(r"step_(\d{1,15})\.jsonl")
MOST_CHARS = 1 << 20
"""Characters of all data URLs of a page, beside 1 MB of scripts."""


@dataclass
class Gallery:
    """Shows images of a run directory while ``left`` characters suffice."""

    run_dir: Place
    left: int = MOST_CHARS
    left_out: int = 0
    """Images that found no room on the page."""
    unkept: int = 0
    """Images without a thumbnail in the run directory."""

    def html(self, images: Sequence[Media], uid: str) -> str:
        """The images of a sample, in order; '' for none. One that is not shown has its size."""
        if not images:
            return ""
        shown = "".join(self._figure(image, i, len(images)) for i, image in enumerate(images, 1))
        label = text(f"Images of {uid}")
        opening = f'<div class="images" tabindex="0" role="group" aria-label="{label}">'
        return f"{opening}{shown}</div>"

    def notes(self) -> list[str]:
        """The images that the page lacks, since the last call."""
        found = []
        if self.left_out:
            found.append(
                f"{self.left_out} images are left out: a page has at most {MOST_CHARS >> 20} MiB "
                "of them. They are in media/ of the run directory."
            )
        if self.unkept:
            found.append(
                f"{self.unkept} images have no thumbnail in media/ of the run directory "
                "(log.thumbnails_mib)."
            )
        self.left_out = self.unkept = 0
        return found

    def _figure(self, image: Media, number: int, count: int) -> str:
        size = f"{image.width} x {image.height} pixels"
        shown = self._url(str(image.sha256))
        if shown is None:
            return f"<span>{text(titled(image))}</span>"
        alt = f"Image {number} of {count}, {size}"
        return f'<img src="{shown}" alt="{text(alt)}" title="{text(size)}">'

    def _url(self, sha256: str) -> str | None:
        found = read_thumbnail(self.run_dir, sha256)
        if found is None:
            self.unkept += 1
            return None
        kind, content = found
        url = f"data:image/{kind};base64,{base64.b64encode(content).decode()}"
        if len(url) > self.left:
            self.left_out += 1
            return None
        self.left -= len(url)
        return url


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


EACH, TOKENS, TOP = 3, 160, 4
"""Samples for each of loss, gap and age; tokens of a sample that are shown, the first ones; the
most probable tokens of a side."""
BY: tuple[By, ...] = ("loss", "gap", "stale")
_CHOICE = (
    '<fieldset class="by"><legend>Colour tokens by</legend>'
    '<label><input type="radio" name="by" value="loss" checked> loss</label>'
    '<label><input type="radio" name="by" value="gap"> gap: log q − log p</label></fieldset>'
)


def token_sections(run: RecordedRun, gallery: Gallery) -> list[Section]:
    """The section, of the samples with the worst tokens; none for a run without records."""
    if not files(run.folder / MICROSCOPE):
        return []
    chosen = {(one.uid, one.step): one for by in BY for one in worst(records(run.folder), by, EACH)}
    samples = list(chosen.values())
    found = sample_status(run, [one.uid for one in samples])
    cards = "".join(_token_card(i, one, found[one.uid], gallery) for i, one in enumerate(samples))
    data = [[_token(one, row) for row in range(min(len(one), TOKENS))] for one in samples]
    about = (
        "The recorded responses with the largest loss, the largest gap and the oldest tokens. Red: "
        "a large loss, or more probable for the student than for the teacher; blue: more probable "
        "for the teacher. Point at a token, or move with the arrow keys. async_opd inspect RUN_DIR "
        "shows every recorded sample."
    )
    html = (
        f'{paragraphs([about])}<div class="microscope">{_CHOICE}{cards}</div>'
        f"{paragraphs(gallery.notes(), 'soft')}"
        f'<script type="application/json" id="token-data">{inert(data)}</script>'
    )
    return [Section("tokens", "Tokens", html)]


def _token_card(number: int, one: SampleRecord, status: str, gallery: Gallery) -> str:
    loss, gap = levels(one, "loss"), levels(one, "gap")
    spans = ""
    for title, rows in one.by_turn():
        shown = rows[: max(TOKENS - rows.start, 0)]
        spans += f'<span class="soft"> {text(_cut(title))} </span>' if title and shown else ""
        spans += "".join(
            f'<span class="tok" tabindex="{-1 if r else 0}" data-loss="{loss[r]}" '
            f'data-gap="{gap[r]}">{text(one.text(one["token"][r]))}</span>'
            for r in shown
        )
    more = f" The first {TOKENS} of {len(one)} tokens." if len(one) > TOKENS else ""
    facts = (
        f"Step {one.step}, teacher {one.teacher}, stale by {one.staleness}, finished by "
        f"{one.finish_reason}, weight {one.weight:.4g}.{more}"
    )
    known = f'<p class="soft">Status: <a href="#trouble">{text(status)}</a>. {text(facts)}</p>'
    return (
        f'<article class="card sample" data-sample="{number}"><h3>{text(one.uid)}</h3>{known}'
        f"{gallery.html(one.images, one.uid)}"
        f'<p class="soft">Prompt: {text(one.prompt)}</p>'
        f'<p class="tokens" role="group" aria-label="Tokens of {text(one.uid)}">{spans}</p>'
        '<div class="panel" role="status"></div></article>'
    )


def _token(one: SampleRecord, row: int) -> dict[str, Any]:
    """The content of the panel: [name, value] pairs, and the most probable tokens of both sides."""
    values = {
        "loss": one.loss,
        "gap": one.gap,
        "log q": one["student_logprob"],
        "log p": one["teacher_logprob"],
        "log μ": one["rollout_logprob"],
        "q/μ": one["importance"],
    }
    facts = [["token", one.text(one["token"][row])], ["at", str(one["position"][row])]]
    facts += [[name, f"{float(column[row]):.3g}"] for name, column in values.items()]
    facts += [["version", str(one["version"][row])], ["clamps", ", ".join(one.clamps(row)) or "–"]]
    sides = [_shares(alternatives(one, row, side, TOP)) for side in ("student", "support")]
    return {"facts": facts, "student": sides[0], "support": sides[1]}


def _shares(found: Sequence[Sequence[object]]) -> list[list[str]]:
    """[token, the teacher's probability, the student's] as texts."""
    return [
        [str(one[0]), *(f"{math.exp(v):.1%}" if isinstance(v, float) else "–" for v in one[1:])]
        for one in found
    ]
