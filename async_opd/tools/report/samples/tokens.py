"""The report's section of recorded tokens: a few responses, each token coloured by loss or gap.

The values of a token, and the most probable tokens of both sides, are in the page's JSON; page.js
shows those of the token under the pointer or with the focus, which arrow keys move.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from async_opd.microscope.folder import MICROSCOPE, files, records
from async_opd.microscope.record import SampleRecord
from async_opd.tools.report.page import Section, inert, paragraphs, text
from async_opd.tools.report.recorded_run import RecordedRun
from async_opd.tools.report.sample_status import sample_status
from async_opd.tools.report.samples.gallery import Gallery
from async_opd.tools.report.worst import By, alternatives, levels, worst

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
    cards = "".join(_card(i, one, found[one.uid], gallery) for i, one in enumerate(samples))
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


def _card(number: int, one: SampleRecord, status: str, gallery: Gallery) -> str:
    shades = zip(levels(one, "loss"), levels(one, "gap"), strict=True)
    spans = "".join(
        f'<span class="tok" tabindex="{-1 if row else 0}" data-loss="{loss}" data-gap="{gap}">'
        f"{text(one.text(one['token'][row]))}</span>"
        for row, (loss, gap) in enumerate(list(shades)[:TOKENS])
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
