"""Which charts a run has: those of metrics.yaml, pools over time, the life of a sample.

metrics.yaml ──► Plot ─┐
RecordedRun ──metrics by key──► Line … ──charts──► Chart
            ──lives──► Span …  ──────────────────────┘
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import accumulate, groupby, pairwise
from typing import Any

from async_opd.core.uid import TRACED
from async_opd.files.lines import MetricsRow
from async_opd.observability.metering import POOLS_S
from async_opd.observability.metric_catalogue import Axis, Part, Plot, expression, plots
from async_opd.observability.terminal import duration
from async_opd.tools.report.charts import Chart, Line, Span, bars, lines, shares_over_time, timeline
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
from async_opd.tools.report.recorded_run import STEP_S, RecordedRun
from async_opd.tools.report.sample_timelines import PARTS, WORK, SampleTimeline
from async_opd.tools.report.verdict import display_name
from async_opd.tools.report.wall_time import PHASES, START_UP, WallTime, phases

WINDOWS = 60
"""Parts of a pool's shares over time, at most: of about as many seconds each."""
PARTS_SHOWN = 12
"""Parts of a run whose phases are drawn: the last ones."""
ACCURACY = re.compile(r"eval/(.+)/accuracy")
_SEVERAL = re.compile(r"eval/(.+/(?:pass@(?!1$)|maj@)\d+)")
_LAG = re.compile(r"staleness/lag_(\d{1,3})")
Points = Callable[[str], Sequence[tuple[float, float]]]
"""The points (x, y) of a metric."""


def metric_charts(run: RecordedRun, part: Part) -> Iterator[Chart]:
    """The charts that ``observability/metrics.yaml`` has for a part of the page.

    Those that would be the same lines twice are one.
    """
    drawn = list[Chart]()
    for plot in plots(part):
        chart = KINDS[plot.kind](run, plot)
        same = next((at for at, one in enumerate(drawn) if chart and _alike(one, chart)), None)
        if chart and same is not None:
            one = drawn[same]
            title = f"{one.title}, {chart.title[:1].lower()}{chart.title[1:]}"
            note = f"{one.note} {chart.note} Both are the same in this run."
            drawn[same] = replace(one, title=title, note=note)
        elif chart:
            drawn.append(chart)
    yield from drawn


def _alike(one: Chart, other: Chart) -> bool:
    """Whether two charts have the same lines, of the same names, but for the last digits."""
    values = one.spec["data"]["values"], other.spec["data"]["values"]
    return (one.columns, len(values[0])) == (other.columns, len(values[1])) and all(
        a.keys() == b.keys() and all(_close(a[key], b[key]) for key in a)
        for a, b in zip(*values, strict=True)
    )


def _close(one: Any, other: Any) -> bool:
    both = isinstance(one, float) and isinstance(other, float)
    return math.isclose(one, other, rel_tol=1e-6) if both else bool(one == other)


def _lines(run: RecordedRun, plot: Plot) -> Chart | None:
    x, (points,) = over(plot.x, [run])
    found = [line for label, keys in plot.lines.items() for line in _line(run, label, keys, points)]
    return lines(plot.key, plot.title, plot.note, found, x=x, y=plot.y, form=plot.form)


def over(axis: Axis, runs: Sequence[RecordedRun]) -> tuple[str, list[Points]]:
    """The title of the axis of steps or of time, and of each run the points of a metric on it."""
    if axis == "step":
        return "step", [run.series for run in runs]
    walls = [WallTime.of(run) for run in runs]
    unit, size = max(walls, key=lambda wall: wall.seconds).unit

    def points_of(run: RecordedRun, wall: WallTime) -> Points:
        return lambda key: [(wall.at(time) / size, value) for time, value in run.timed(key)]

    return f"time of the run ({unit})", list(map(points_of, runs, walls))


def _line(run: RecordedRun, label: str, keys: Sequence[str], points: Points) -> list[Line]:
    """The lines of the first of the keys, or patterns, that has values."""
    for key in keys:
        sign, pattern = (-1, key[1:]) if key.startswith("-") else (1, key)
        if drawn := list(_by_name(run, expression(pattern), points, sign, label)):
            return drawn
    return []


def _by_name(
    run: RecordedRun, pattern: re.Pattern[str], points: Points, sign: int = 1, label: str = ""
) -> Iterator[Line]:
    """A line for each key that the pattern matches, times ``sign``, named by its first group."""
    for key in sorted(run.keys):
        if found := pattern.fullmatch(key):
            name = found[1] if pattern.groups else label
            yield Line(name, [(at, sign * value) for at, value in points(key)])


def _accuracies(run: RecordedRun, plot: Plot) -> Chart | None:
    found = list(evaluation_lines(run))
    return lines(plot.key, plot.title, plot.note, found, y=plot.y, form=plot.form)


def _several_answers(run: RecordedRun, plot: Plot) -> Chart | None:
    """Of ``eval`` only, without pass@1, which is the accuracy."""
    found = list(_by_name(run, _SEVERAL, run.series))
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


def wall_time(run: RecordedRun) -> Iterator[Chart]:
    """The phases of the run, start-up first; none of a run that has written nothing."""
    wall = WallTime.of(run)
    unit, size = wall.unit
    found = list(phases(run, wall))
    if not found:
        return
    start_s = sum(one.seconds for one in found if one.name == START_UP)
    several = len(wall.parts) > 1
    shown = f" The last {PARTS_SHOWN} parts are shown." if len(wall.parts) > PARTS_SHOWN else ""
    named = [
        (f"part {one.part}" if several else "the run", one)
        for one in found
        if one.part > len(wall.parts) - PARTS_SHOWN
    ]
    yield timeline(
        "wall-time",
        "Wall time",
        f"Start-up, until the engines serve, takes {duration(start_s)} of {duration(wall.seconds)} "
        f"({start_s / wall.seconds:.0%}). The end has the last evaluation, the writing of the "
        f"student, and steps that a resume has undone.{shown}",
        [
            Span(row, one.name, one.name, True, one.begin / size, one.end / size)
            for row, one in named
        ],
        places=PHASES,
        x=f"time of the run ({unit})",
        tips={"n": "part", "w": "phase"},
        columns=("part", "phase", f"begins ({unit})", f"takes ({unit})", "share"),
        rows=tuple(
            (
                *(row, one.name, f"{one.begin / size:.4g}", f"{one.seconds / size:.4g}"),
                f"{one.seconds / wall.seconds:.0%}",
            )
            for row, one in named
        ),
    )


def pool_charts(run: RecordedRun) -> Iterator[Chart]:
    """How each pool spent its time."""
    wall = WallTime.of(run)
    unit, size = wall.unit
    found = [
        (begin / size, end / size, times)
        for begin, end, rows in _windows(run, wall)
        if (times := pool_times(run, rows))
    ]
    for index, pool in enumerate(run.pools if found else ()):
        shares = [(begin, end, times[index].shares) for begin, end, times in found]
        names = [name for name in COLOURED if any(name in share for *_, share in shares)]
        yield shares_over_time(
            f"pool-{index}",
            f"{display_name(pool)}: computing and waiting".capitalize(),
            "Shares of its time. The pool that limits computes nearly all of the time.",
            names,
            [(begin, end, [of.get(name, 0.0) for name in names]) for begin, end, of in shares],
            x=f"time of the run ({unit})",
        )


def _windows(
    run: RecordedRun, wall: WallTime
) -> Iterator[tuple[float, float, Sequence[MetricsRow]]]:
    """(begin, end, steps) in seconds of the run, each of about as many seconds.

    A window has steps of one part, and ends with a report of the pools if the run has some: the
    figures of pools are then of just these steps. Steps after a part's last report are left out.
    """
    reported = any(POOLS_S in row.values for row in run.steps)
    least_s = total(run.steps, STEP_S) / WINDOWS
    for _, part in groupby(run.steps, key=lambda row: wall.part_at(row.time)):
        rows = list(part)
        ends = [at for at, row in enumerate(rows) if POOLS_S in row.values or not reported]
        first, seconds, before = 0, 0.0, 0.0
        for start, at in pairwise([-1, *ends]):
            seconds += total(rows[start + 1 : at + 1], STEP_S)
            if seconds >= least_s or at == ends[-1]:
                begin = wall.at(rows[first].time - rows[first].values[STEP_S])
                end = wall.at(rows[at].time)
                yield max(begin, before), end, rows[first : at + 1]
                first, seconds, before = at + 1, 0.0, end


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
