"""Which charts a run has: those of metrics.yaml, pools over time, the life of a sample.

metrics.yaml ──► Plot ─┐
RecordedRun ──metrics by key──► Line … ──charts──► Chart
            ──lives──► Span …  ──────────────────────┘
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from itertools import accumulate, pairwise

from async_opd.core.uid import TRACED
from async_opd.observability.metric_catalogue import Part, Plot, expression, plots
from async_opd.tools.report.charts import (
    Chart,
    Line,
    Span,
    bars,
    lines,
    shares_over_time,
    timeline,
)
from async_opd.tools.report.pool_times import (
    COMPUTING,
    GPUS,
    OTHER,
    PROMPTS,
    ROLLOUTS,
    SCORED,
    SYNC,
    pool_times,
    total,
)
from async_opd.tools.report.recorded_run import RecordedRun
from async_opd.tools.report.sample_timelines import PARTS, WORK, SampleTimeline
from async_opd.tools.report.verdict import display_name

WINDOWS = 60
"""Points of a pool's shares over time: each is the mean of as many steps as that takes."""
ACCURACY = re.compile(r"eval/(.+)/accuracy")
_SEVERAL = re.compile(r"eval/(.+/(?:pass@(?!1$)|maj@)\d+)")
_LAG = re.compile(r"staleness/lag_(\d{1,3})")


def metric_charts(run: RecordedRun, part: Part) -> Iterator[Chart | None]:
    """The charts that ``observability/metrics.yaml`` has for a part of the page."""
    for plot in plots(part):
        yield KINDS[plot.kind](run, plot)


def _lines(run: RecordedRun, plot: Plot) -> Chart | None:
    found = [line for label, keys in plot.lines.items() for line in _line(run, label, keys)]
    return lines(plot.key, plot.title, plot.note, found, y=plot.y, form=plot.form)


def _line(run: RecordedRun, label: str, keys: Sequence[str]) -> list[Line]:
    """The lines of the first of the keys, or patterns, that has values."""
    for key in keys:
        sign, pattern = (-1, key[1:]) if key.startswith("-") else (1, key)
        if drawn := list(_by_name(run, expression(pattern), sign, label)):
            return drawn
    return []


def _by_name(
    run: RecordedRun, pattern: re.Pattern[str], sign: int = 1, label: str = ""
) -> Iterator[Line]:
    """A line for each key that the pattern matches, times ``sign``, named by its first group."""
    for key in sorted(run.keys):
        if found := pattern.fullmatch(key):
            name = found[1] if pattern.groups else label
            yield Line(name, [(step, sign * value) for step, value in run.series(key)])


def _accuracies(run: RecordedRun, plot: Plot) -> Chart | None:
    found = list(evaluation_lines(run))
    return lines(plot.key, plot.title, plot.note, found, y=plot.y, form=plot.form)


def _several_answers(run: RecordedRun, plot: Plot) -> Chart | None:
    """Of ``eval`` only, without pass@1, which is the accuracy."""
    found = list(_by_name(run, _SEVERAL))
    return lines(plot.key, plot.title, plot.note, found, y=plot.y, form=plot.form)


def evaluation_lines(run: RecordedRun) -> Iterator[Line]:
    """Accuracy by source, from the evaluation before the first step on."""
    errors_of = dict[str, str]()  # of each source its standard error: that of its mean@n
    for key in run.keys:
        source, mean, _ = key.removeprefix("eval/").partition("/mean@")
        if mean and key.startswith("eval/") and key.endswith("_stderr"):
            errors_of.setdefault(source, key)
    for key in sorted(run.keys):
        if (found := ACCURACY.fullmatch(key)) is None:
            continue
        points = [*_initial(run, key), *run.series(key)]
        error = errors_of.get(found[1], "")
        by_step = dict([*_initial(run, error), *run.series(error)])
        errors = [by_step.get(step, 0.0) for step, _ in points] if by_step else None
        yield Line(found[1], points, errors)


def _initial(run: RecordedRun, key: str) -> list[tuple[int, float]]:
    """The same of the evaluation before training."""
    return run.series(key.replace("eval/", "eval_initial/", 1))


def _lags(run: RecordedRun, plot: Plot) -> Chart | None:
    """A histogram of all trained samples."""
    lags = (_LAG.fullmatch(key) for key in sorted(run.keys))
    counts = {int(found[1]): total(run.steps, found[0]) for found in lags if found}
    trained = sum(counts.values()) or 1.0
    most = max(counts, default=0)
    named = [
        (f"{lag} or more" if lag == 8 else str(lag), counts.get(lag, 0.0) / trained)
        for lag in range(most + 1)
    ]
    return bars(plot.key, plot.title, plot.note, named if counts else [], x=plot.y)


KINDS = {
    "lines": _lines,
    "accuracies": _accuracies,
    "several_answers": _several_answers,
    "lags": _lags,
}
"""How a chart of the table is drawn, by its kind."""


def pool_charts(run: RecordedRun) -> Iterator[Chart]:
    """How each pool spent its time."""
    size = -(-len(run.steps) // WINDOWS) or 1
    windows = [run.steps[at : at + size] for at in range(0, len(run.steps), size)]
    found = [(rows[-1].step, pool_times(run, rows)) for rows in windows]
    for index, pool in enumerate(run.pools if found else ()):
        shares = [(float(step), times[index].shares) for step, times in found if times]
        names = [name for name in COLOURED if any(name in share for _, share in shares)]
        yield shares_over_time(
            f"pool-{index}",
            f"{display_name(pool)}: computing and waiting".capitalize(),
            "Shares of its time. The pool that limits computes nearly all of the time.",
            names,
            [(step, [share.get(name, 0.0) for name in names]) for step, share in shares],
        )


def sample_timelines(lives: Sequence[SampleTimeline]) -> Iterator[Chart]:
    """The mean share of each part of a sample's life, and some single lives; none without lives."""
    whole = sum(life.whole for life in lives)
    if not whole:
        return
    ends = accumulate((sum(life.total(name) for life in lives) for name in PARTS), initial=0)
    means = [
        (name, *PARTS[name], start / whole, end / whole)
        for name, (start, end) in zip(PARTS, pairwise(ends), strict=True)
        if end > start
    ]
    work = sum(end - start for _, _, kind, start, end in means if kind == WORK)
    mean_s = whole / len(lives) / 1e6
    yield timeline(
        "life",
        "The life of a sample",
        f"Means of {len(lives):,} trained samples, which the trace follows (one in {TRACED}): "
        f"{mean_s:.3g} s from admission to the end of the step, {work:.0%} of them at work (thick "
        "bars) and the others waiting (thin).",
        [Span(name, name, place, kind == WORK, *at) for name, place, kind, *at in means],
        places=PLACES,
        x="share of its life",
        form=".1~%",
        columns=("the sample", "pool", "kind", "share", "mean (s)"),
        rows=tuple(
            (name, place, kind, f"{end - start:.1%}", f"{(end - start) * mean_s:.3g}")
            for name, place, kind, start, end in means
        ),
    )
    named = _named(lives)
    yield timeline(
        "lives",
        "Single samples",
        "From admission to the end of the step, in seconds; thick bars are work. The slowest ones "
        "show where a long wait comes from.",
        [
            Span(row, name, PARTS[name][0], PARTS[name][1] == WORK, start / 1e6, end / 1e6)
            for row, life in named
            for name, start, end in life.parts
        ],
        places=PLACES,
        x="seconds since admission",
        columns=("life", "uid", "the sample", "kind", "begins (s)", "takes (s)"),
        rows=tuple(
            (
                row,
                life.uid,
                name,
                PARTS[name][1],
                f"{start / 1e6:.4g}",
                f"{(end - start) / 1e6:.4g}",
            )
            for row, life in named
            for name, start, end in life.parts
        ),
    )


def _named(lives: Sequence[SampleTimeline]) -> list[tuple[str, SampleTimeline]]:
    """The fastest, the median and the slowest lives, each once."""
    found = sorted(lives, key=lambda life: life.whole)
    last = len(found) - 1
    places = {"fastest": 0, "median": last // 2, "third slowest": last - 2}
    places |= {"second slowest": last - 1, "slowest": last}
    chosen = {at: name for name, at in places.items() if at >= 0}
    return [(chosen[at], found[at]) for at in sorted(chosen)]


COLOURED = (COMPUTING, PROMPTS, ROLLOUTS, SCORED, SYNC, GPUS, OTHER)
"""Shares from below, so that pools have the same colours: of the waits for input each has one."""
PLACES = tuple(dict.fromkeys(place for place, _ in PARTS.values()))
