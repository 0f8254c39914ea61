"""``compare.html`` and a table: several runs beside each other, and the keys that differ.

RecordedRun … ──figures, differing keys──► table      ──lines of all runs──► compare.html
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import Any

from async_opd.config.secrets import Redactor
from async_opd.core.nesting import leaves
from async_opd.observability.metric_catalogue import catalogue
from async_opd.observability.terminal import duration
from async_opd.tools.report.charts import Chart, Line, lines
from async_opd.tools.report.facts import elapsed, tiles_of
from async_opd.tools.report.page import Section, page, paragraphs, table, text
from async_opd.tools.report.pool_times import pool_times, steady_rows
from async_opd.tools.report.recorded_run import RecordedRun
from async_opd.tools.report.run_charts import ACCURACY, evaluation_lines, over
from async_opd.tools.report.verdict import judge

NO_DIFFERENCE = ("run_dir", "plan", "report")
"""Keys that make no difference to a run."""
NEARLY = 0.95
"""Of the highest accuracy of all runs: the accuracy up to which their times are compared."""
CLOSE = 1.05
"""Two times are close if neither is longer than this times the other."""


def labels(runs: Sequence[RecordedRun]) -> list[str]:
    """A name for each run: that of its directory, with more of its path where two are the same."""
    parts = [str(run.folder).split("/") for run in runs]
    for depth in range(1, max(map(len, parts)) + 1):
        found = ["/".join(one[-depth:]) for one in parts]
        if len(set(found)) == len(found):
            return found
    return [f"{index}: {run.folder}" for index, run in enumerate(runs, 1)]


def figures_of(runs: Sequence[RecordedRun]) -> tuple[tuple[str, ...], list[tuple[str, ...]]]:
    """Columns and rows: a figure each, of all runs; the verdicts last."""
    goal = goal_of(runs)
    found = [
        {
            "status": run.status,
            **dict(tiles_of(run)),
            **_pools(run),
            **_last(run),
            **_reached(run, goal),
        }
        for run in runs
    ]
    names = list(dict.fromkeys(name for one in found for name in one))
    rows = [(name, *(one.get(name, "–") for one in found)) for name in names]
    rows.append(("verdict", *(judge(run).headline for run in runs)))
    return ("", *labels(runs)), rows


def goal_of(runs: Sequence[RecordedRun]) -> float:
    """``NEARLY`` of the highest mean accuracy that a run had; 0 without evaluations."""
    return NEARLY * max((value for run in runs for _, value in _accuracies(run)), default=0.0)


def recommended(runs: Sequence[RecordedRun]) -> str:
    """The staleness threshold and the sync steps of the run that came to the goal first.

    Of runs with close times it is the one with the smallest threshold, then with the fewest sync
    steps. Empty if the runs do not differ in these keys, or none was evaluated.
    """
    pairs = [(run.config.async_.staleness_threshold, run.config.async_.sync_steps) for run in runs]
    goal = goal_of(runs)
    reached = [
        (seconds, pair, name)
        for run, pair, name in zip(runs, pairs, labels(runs), strict=True)
        if (seconds := _seconds_to(run, goal)) is not None
    ]
    if not goal or not reached or len(set(pairs)) < 2:
        return ""
    first = min(seconds for seconds, *_ in reached)
    seconds, pair, name = min(
        (one for one in reached if one[0] <= CLOSE * first), key=lambda one: one[1]
    )
    return (
        f"recommended async.staleness_threshold={pair[0]:g} async.sync_steps={pair[1]}: {name} has "
        f"an accuracy of {goal:.1%} ({NEARLY:.0%} of the highest) after {duration(seconds)}, the "
        f"first one after {duration(first)}; {len(reached)} of {len(runs)} runs came so far"
    )


def differing_keys(runs: Sequence[RecordedRun]) -> list[tuple[str, ...]]:
    """(key, value in each run) of the config keys whose values differ, without secrets."""
    trees = [run.config.model_dump(mode="json", by_alias=True) for run in runs]
    hide = Redactor()  # not the variables that a stranger's config names: it could ask for values
    flat = [dict(leaves(tree)) for tree in trees]
    keys = sorted({key for one in flat for key in one})
    return [
        (key, *(hide(_written(one, key)) for one in flat))
        for key in keys
        if key.split(".")[0] not in NO_DIFFERENCE and len({_written(one, key) for one in flat}) > 1
    ]


def comparison(runs: Sequence[RecordedRun]) -> str:
    """The page with all runs' lines over each other."""
    names = labels(runs)
    columns, figures = figures_of(runs)
    keys = differing_keys(runs)
    head = f"<h1>{len(runs)} runs compared</h1>" + f'<p class="soft">{text(" · ".join(names))}</p>'
    no_keys = paragraphs(["The configs are the same."])
    sections = [
        Section("figures", "Figures", table(columns, figures) + paragraphs([recommended(runs)])),
        Section("keys", "Differences", table(("key", *names), keys) if keys else no_keys),
        Section("learning", "Learning", "", tuple(_learning(runs, names))),
        Section("speed", "Speed and staleness", "", tuple(_overlaid(runs, names, "speed"))),
    ]
    return page(f"{len(runs)} runs · async_opd compare", head, sections)


def _learning(runs: Sequence[RecordedRun], names: Sequence[str]) -> Iterator[Chart]:
    by_source: dict[str, list[Line]] = {}
    for run, name in zip(runs, names, strict=True):
        for line in evaluation_lines(run):
            by_source.setdefault(line.name, []).append(Line(name, line.points, line.errors))
    for index, (source, found) in enumerate(sorted(by_source.items())):
        title, note = f"Accuracy: {source}", "Evaluations; bands are one standard error."
        chart = lines(f"accuracy-{index}", title, note, found, y="accuracy", form=".0%")
        if chart is not None:
            yield chart
    yield from _overlaid(runs, names, "learning")


def _overlaid(runs: Sequence[RecordedRun], names: Sequence[str], part: str) -> Iterator[Chart]:
    """The charts that ``observability/metrics.yaml`` has for a part of the page."""
    for metric in catalogue():
        overlay, key = metric.chart.compare, metric.pattern
        if overlay is None or overlay.part != part:
            continue
        x, points = over(overlay.x, runs)
        found = [Line(name, of(key)) for name, of in zip(names, points, strict=True)]
        how = "step by step" if overlay.x == "step" else "over the time of each run"
        title, note = overlay.title, f"{key}, {how}."
        chart = lines(key.replace("/", "-"), title, note, found, x=x, y=metric.unit)
        if chart is not None:
            yield chart


def _last(run: RecordedRun) -> dict[str, str]:
    """The last accuracy of each source."""
    return {
        f"accuracy of {line.name}": f"{line.points[-1][1]:.1%}"
        for line in evaluation_lines(run)
        if line.points
    }


def _pools(run: RecordedRun) -> dict[str, str]:
    """The share of its time in which each pool computed, and the share of tokens thrown away."""
    times = pool_times(run, steady_rows(run))
    busy = {f"busy: {one.name}": f"{one.computing:.0%}" for one in times}
    wasted = run.series("waste/share")
    return busy | ({"tokens thrown away": f"{wasted[-1][1]:.1%}"} if wasted else {})


def _accuracies(run: RecordedRun) -> Iterator[tuple[float, float]]:
    """(time since the epoch, mean accuracy over the sources) of each evaluation with a step."""
    for row in run.rows:
        found = [row.values[key] for key in row.values if ACCURACY.fullmatch(key)]
        if found:
            yield row.time, sum(found) / len(found)


def _seconds_to(run: RecordedRun, goal: float) -> float | None:
    """Seconds of the run until its mean accuracy was ``goal``; None if it never was."""
    times = [time for time, accuracy in _accuracies(run) if accuracy >= goal]
    return elapsed(run, times[0]) if times else None


def _reached(run: RecordedRun, goal: float) -> dict[str, str]:
    """How long the run took to ``goal``."""
    seconds = _seconds_to(run, goal) if goal else None
    return {} if seconds is None else {f"time to {goal:.1%}": duration(seconds)}


def _written(flat: dict[str, Any], key: str) -> str:
    return json.dumps(flat[key], ensure_ascii=False) if key in flat else "–"
