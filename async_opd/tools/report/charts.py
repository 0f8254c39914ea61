"""The charts of a report as Vega-Lite specifications, each with the table of its numbers.

Colours, widths and fonts are the page's (page.js). A specification names its own fields only:
values of a run are data, which no expression evaluates.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

POINTS = 240
"""Points of a line: more are joined to means, which a screen shows as well."""
ROWS = 60
"""Rows of a chart's table: as many of its points, evenly spread."""

Spec = dict[str, Any]


@dataclass(frozen=True)
class Chart:
    """``key`` is unique in a page; ``note`` says what is shown, and what is normal."""

    key: str
    title: str
    note: str
    spec: Spec
    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]


@dataclass(frozen=True)
class Line:
    """Points (x, y) of one line; ``errors`` are standard errors of y, if it has them."""

    name: str
    points: Sequence[tuple[float, float]]
    errors: Sequence[float] | None = None


def lines(
    key: str,
    title: str,
    note: str,
    found: Sequence[Line],
    *,
    y: str,
    x: str = "step",
    form: str = ",.5~g",
) -> Chart | None:
    """Lines over ``x``, with bands of one standard error; None without points."""
    thin = [_thinned(line) for line in found if line.points]
    if not thin:
        return None
    values = [
        {"x": at, "y": value, "s": line.name, **_band(line, index, value, "%" in form)}
        for line in thin
        for index, (at, value) in enumerate(line.points)
    ]
    encoding = {
        "x": {"field": "x", "type": "quantitative", "title": x, "axis": {"tickMinStep": 1}},
        "color": _colour([line.name for line in thin], **_symbols(thin)),
    }
    few = max(len(line.points) for line in thin) <= 40
    line_layer: Spec = {
        "mark": {"type": "line", "point": few, "clip": True},
        "encoding": {
            "y": _value("y", y, form),
            "strokeDash": {"field": "s", "type": "nominal", "legend": None},
            "tooltip": [_tip("s", "line"), _tip("x", x), _tip("y", y, form)],
        },
    }
    layers = [line_layer]
    if any(line.errors for line in thin):
        band = {"y": _value("lo", y, form), "y2": {"field": "hi"}}
        layers.insert(0, {"mark": {"type": "area", "opacity": 0.18}, "encoding": band})
    spec = {"data": {"values": values}, "encoding": encoding, "layer": layers}
    rows = tuple(
        (line.name, f"{at:g}", f"{value:.4g}")
        for line in thin
        for at, value in line.points[:: max(1, len(line.points) * len(thin) // ROWS)]
    )
    return Chart(key, title, note, spec, ("line", x, y), rows)


def bars(
    key: str, title: str, note: str, shares: Sequence[tuple[str, float]], *, x: str
) -> Chart | None:
    """A bar for each of several shares; None if there are none."""
    if not shares:
        return None
    spec = {
        "data": {"values": [{"x": name, "y": share} for name, share in shares]},
        "mark": {"type": "bar", "cornerRadiusEnd": 3, "width": {"band": 0.8}},
        "encoding": {
            "x": {"field": "x", "type": "nominal", "title": x, "sort": None}
            | {"axis": {"labelAngle": 0}},
            "y": _value("y", "share of samples", ".0%"),
            "tooltip": [_tip("x", x), _tip("y", "share", ".1%")],
        },
    }
    rows = tuple((name, f"{share:.1%}") for name, share in shares)
    return Chart(key, title, note, spec, (x, "share"), rows)


def shares_over_time(
    key: str,
    title: str,
    note: str,
    names: Sequence[str],
    found: Sequence[tuple[float, Sequence[float]]],
) -> Chart:
    """Areas that are stacked to 1: ``found`` has (step, shares of ``names``).

    Shares are those from the step of the entry before, or from step 0, up to their own.
    The names keep their colours whether they occur or not; the legend has those that do.
    """
    occurring = [name for at, name in enumerate(names) if any(row[at] > 0.005 for _, row in found)]
    values = [
        {"x": at, "y": share, "s": name, "o": order}
        for at, row in [(0.0, shares) for _, shares in found[:1]] + list(found)
        for order, (name, share) in enumerate(zip(names, row, strict=True))
    ]
    spec = {
        "data": {"values": values},
        "mark": {"type": "area", "interpolate": "step-before", "line": False, "opacity": 0.9},
        "encoding": {
            "x": {"field": "x", "type": "quantitative", "title": "step"}
            | {"axis": {"tickMinStep": 1}, "scale": {"nice": False}},
            "y": {**_value("y", "share of time", ".0%"), "stack": "zero"}
            | {"scale": {"domain": [0, 1]}},
            "color": _colour(names, occurring),
            "order": {"field": "o", "type": "quantitative"},
            "tooltip": [_tip("s", "time"), _tip("x", "step"), _tip("y", "share", ".0%")],
        },
    }
    rows = tuple(
        (f"{at:g}", *(f"{share:.0%}" for share in row))
        for at, row in found[:: max(1, len(found) // ROWS)]
    )
    return Chart(key, title, note, spec, ("step", *names), rows)


@dataclass(frozen=True)
class Span:
    """A bar of a timeline, in the line ``row``: thick where ``works``, thin where it waits."""

    row: str
    what: str
    place: str
    works: bool
    start: float
    end: float


def timeline(
    key: str,
    title: str,
    note: str,
    spans: Sequence[Span],
    *,
    places: Sequence[str],
    x: str,
    form: str = ",.4~g",
    columns: tuple[str, ...],
    rows: tuple[tuple[str, ...], ...],
) -> Chart:
    """Bars from start to end, coloured by place; lines in the order of their first spans."""
    lines_ = list(dict.fromkeys(span.row for span in spans))
    values = [
        {"n": span.row, "w": span.what, "s": span.place, "k": "work" if span.works else "waiting"}
        | {"a": span.start, "b": span.end, "d": span.end - span.start}
        for span in spans
    ]
    layers = [
        {
            "transform": [{"filter": {"field": "k", "equal": kind}}],
            "mark": {"type": "bar", "cornerRadius": radius, "height": {"band": band}},
        }
        for kind, band, radius in (("work", 0.72, 3), ("waiting", 0.2, 0))
    ]
    occurring = [place for place in places if any(span.place == place for span in spans)]
    spec = {
        "data": {"values": values},
        "height": 28 * len(lines_) + 4,
        "layer": layers,
        "encoding": {
            "x": {"field": "a", "type": "quantitative", "title": x, "axis": {"format": form}},
            "x2": {"field": "b"},
            "y": {"field": "n", "type": "nominal", "sort": lines_, "title": None},
            "color": _colour(places, occurring),
            "tooltip": [
                *(_tip("n", "sample"),) * (len(lines_) < len(spans)),
                _tip("w", "the sample"),
                _tip("k", "kind"),
                _tip("d", "takes", form),
            ],
        },
    }
    return Chart(key, title, note, spec, columns, rows)


def _thinned(line: Line) -> Line:
    """At most ``POINTS`` points: means of neighbours. Errors are kept where nothing is joined."""
    joined = -(-len(line.points) // POINTS)
    if joined == 1:
        return line
    groups = [line.points[at : at + joined] for at in range(0, len(line.points), joined)]
    return Line(
        line.name,
        [(group[-1][0], sum(value for _, value in group) / len(group)) for group in groups],
    )


def _symbols(found: Sequence[Line]) -> dict[str, Any]:
    """Of the legend: strokes, or squares as dark as the lines where there are bands."""
    if any(line.errors for line in found):
        return {"symbolType": "square", "symbolOpacity": 1}
    return {"symbolType": "stroke"}


def _band(line: Line, index: int, value: float, is_share: bool) -> dict[str, float]:
    """One standard error below and above; of a share between 0 and 1."""
    if line.errors is None:
        return {}
    low, high = value - line.errors[index], value + line.errors[index]
    return {"lo": max(low, 0.0), "hi": min(high, 1.0)} if is_share else {"lo": low, "hi": high}


def _colour(names: Sequence[str], shown: Sequence[str] = (), **legend_: Any) -> Spec:
    """The page's colours in this order; a legend, of ``shown``, if there are several names."""
    legend = {"title": None, **({"values": list(shown)} if shown else {}), **legend_}
    return {
        "field": "s",
        "type": "nominal",
        "scale": {"domain": list(dict.fromkeys(names))},
        "legend": legend if len(names) > 1 else None,
    }


def _value(field: str, title: str, form: str) -> Spec:
    return {
        "field": field,
        "type": "quantitative",
        "title": title,
        "axis": {"format": form},
        "scale": {"zero": False},
    }


def _tip(field: str, title: str, form: str | None = None) -> Spec:
    kind = "nominal" if field in "snwk" else "quantitative"
    return {"field": field, "title": title, "type": kind} | ({"format": form} if form else {})
