"""The charts of a report as Vega-Lite specifications, each with the table of its numbers.

Colours, widths and fonts are the page's (page.js). A specification names its own fields only:
values of a run are data, which no expression evaluates.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

STEP = "step"
"""The axis of steps; any other one is of time."""
POINTS = 240
"""Points of a line: more are joined to means, which a screen shows as well."""
ROWS = 60
"""Rows of a chart's table: as many of its points, evenly spread."""
FEW = 10
"""Points of a line of which none is outlying."""
OUTLYING = 50
"""One in so many points of a line may be outlying, at each end."""
FLAT = 3.0
"""The axis is cut where outlying values make it longer than so many times the other values."""
NAMED = 3
"""Cut values that a chart names."""

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
    x: str = STEP,
    form: str = ",.5~g",
) -> Chart | None:
    """Lines over ``x``, with bands of one standard error; None without points.

    The axis of values ends before outlying ones, which would flatten all others. The note and a
    mark at the end of the axis name them.
    """
    thin = [(_thinned if x == STEP else _in_time)(line) for line in found if line.points]
    if not thin:
        return None
    low, high = _range(thin)
    cut = [
        (line.name, *point) for line in thin for point in line.points if not low <= point[1] <= high
    ]
    scale: Spec = {"zero": False}
    scale |= {"domainMax": high} if any(value > high for *_, value in cut) else {}
    scale |= {"domainMin": low} if any(value < low for *_, value in cut) else {}
    values = [
        {"x": at, "y": value, "s": line.name, **_band(line, index, value, "%" in form)}
        for line in thin
        for index, (at, value) in enumerate(line.points)
    ]
    encoding = {
        "x": {"field": "x", "type": "quantitative", "title": x}
        | {"axis": {"tickMinStep": 1} if x == STEP else {}, "scale": {"zero": x == STEP}},
        "color": _colour([line.name for line in thin], **_symbols(thin)),
    }
    few = max(len(line.points) for line in thin) <= 40
    line_layer: Spec = {
        "mark": {"type": "line", "point": few, "clip": True},
        "encoding": {
            "y": _value("y", y, form) | {"scale": scale},
            "strokeDash": {"field": "s", "type": "nominal", "legend": None},
            "tooltip": [_tip("s", "line"), _tip("x", x), _tip("y", y, form)],
        },
    }
    layers = [line_layer]
    if any(line.errors for line in thin):
        band = {"y": _value("lo", y, form), "y2": {"field": "hi"}}
        layers.insert(0, {"mark": {"type": "area", "opacity": 0.18}, "encoding": band})
    if cut:
        layers += _cut_marks(cut, low, high, x, y, form)
        note = f"{note} {_cut_words(cut, low, high, x, y)}".strip()
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
    found: Sequence[tuple[float, float, Sequence[float]]],
    *,
    x: str,
) -> Chart:
    """Areas that are stacked to 1: ``found`` has (begin, end, shares of ``names``).

    Each is as wide as its time. The names keep their colours whether they occur or not; the legend
    has those that do.
    """
    occurring = [name for at, name in enumerate(names) if any(one[2][at] > 0.005 for one in found)]
    values = [
        {"x": begin, "x2": end, "y": low, "y2": low + share, "d": share, "s": name}
        for begin, end, shares in found
        for name, share, low in zip(names, shares, accumulate(shares, initial=0.0), strict=False)
        if share > 0
    ]
    spec = {
        "data": {"values": values},
        "mark": {"type": "rect", "opacity": 0.9},
        "encoding": {
            "x": {"field": "x", "type": "quantitative", "title": x}
            | {"scale": {"nice": False, "zero": False}},
            "x2": {"field": "x2"},
            "y": _value("y", "share of time", ".0%") | {"scale": {"domain": [0, 1]}},
            "y2": {"field": "y2"},
            "color": _colour(names, occurring),
            "tooltip": [
                _tip("s", "time"),
                _tip("x", f"from, {x}", ",.4~g"),
                _tip("x2", f"to, {x}", ",.4~g"),
                _tip("d", "share", ".0%"),
            ],
        },
    }
    rows = tuple(
        (f"{begin:.4g}", f"{end:.4g}", *(f"{share:.0%}" for share in shares))
        for begin, end, shares in found[:: max(1, len(found) // ROWS)]
    )
    return Chart(key, title, note, spec, (f"from, {x}", f"to, {x}", *names), rows)


@dataclass(frozen=True)
class Span:
    """A bar of a timeline, in the line ``row``: thick where ``works``, thin where it waits."""

    row: str
    what: str
    place: str
    works: bool
    start: float
    end: float


SAMPLE_TIPS = {"n": "sample", "w": "the sample", "k": "kind"}


def timeline(
    key: str,
    title: str,
    note: str,
    spans: Sequence[Span],
    *,
    places: Sequence[str],
    x: str,
    form: str = ",.4~g",
    tips: Mapping[str, str] = SAMPLE_TIPS,
    columns: tuple[str, ...],
    rows: tuple[tuple[str, ...], ...],
) -> Chart:
    """Bars from start to end, coloured by place; lines in the order of their first spans.

    ``tips`` names what a tooltip says: a span's row (``n``), what (``w``) and kind (``k``).
    """
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
        if any(one["k"] == kind for one in values)
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
                *(
                    _tip(field, title)
                    for field, title in tips.items()
                    if field != "n" or len(lines_) < len(spans)
                ),
                _tip("d", "takes", form),
            ],
        },
    }
    return Chart(key, title, note, spec, columns, rows)


def _range(found: Sequence[Line]) -> tuple[float, float]:
    """The least and the largest value of the axis; without those that would flatten the others.

    A line's values without one in ``OUTLYING`` at each end are never cut, nor is anything where
    standard errors are drawn.
    """
    of_lines = [sorted(value for _, value in line.points) for line in found]
    least, most = min(one[0] for one in of_lines), max(one[-1] for one in of_lines)
    if any(line.errors for line in found):
        return least, most
    inner = [
        one[beyond : len(one) - beyond]
        for one in of_lines
        for beyond in [max(len(one) // OUTLYING, 1) if len(one) >= FEW else 0]
    ]
    low, high = min(one[0] for one in inner), max(one[-1] for one in inner)
    margin = (high - low) / 20
    if not margin:
        return least, most
    return (
        low - margin if high - least > FLAT * (high - low) else least,
        high + margin if most - low > FLAT * (high - low) else most,
    )


def _cut_marks(
    cut: Sequence[tuple[str, float, float]], low: float, high: float, x: str, y: str, form: str
) -> list[Spec]:
    """A triangle at the end of the axis for each value that is cut, and the farthest in figures."""
    farthest = max(cut, key=lambda one: max(one[2] - high, low - one[2]))
    data = [
        {"x": at, "y": high if value > high else low, "v": value, "s": name}
        | {"k": "up" if value > high else "down", "n": f"{value:,.4g}"}
        for name, at, value in [farthest, *(one for one in cut if one is not farthest)]
    ]
    place = {
        "x": {"field": "x", "type": "quantitative"},
        "y": {"field": "y", "type": "quantitative"},
    }
    tips = [_tip("s", "line"), _tip("x", x), _tip("v", f"{y}, beyond the axis", form)]
    layers = [
        {
            "data": {"values": [one for one in data if one["k"] == kind]},
            "mark": {"type": "point", "shape": f"triangle-{kind}", "filled": True, "size": 70},
            "encoding": {**place, "tooltip": tips},
        }
        for kind in ("up", "down")
        if any(one["k"] == kind for one in data)
    ]
    first = data[0]
    below = 8 if first["k"] == "up" else -8
    text = {"type": "text", "align": "left", "dx": 8, "dy": below}
    label = {"text": {"field": "n", "type": "nominal"}}
    layers.append({"data": {"values": [first]}, "mark": text, "encoding": {**place, **label}})
    return layers


def _cut_words(
    cut: Sequence[tuple[str, float, float]], low: float, high: float, x: str, y: str
) -> str:
    """A sentence on the values beyond the axis, for the note: the farthest ones first."""
    order = sorted(cut, key=lambda one: -max(one[2] - high, low - one[2]))
    several = len({name for name, _, _ in cut}) > 1
    named = ", ".join(
        f"{value:,.4g} at {x} {at:.4g}{f' ({name})' * several}" for name, at, value in order[:NAMED]
    )
    more = f" and {len(cut) - NAMED} more" if len(cut) > NAMED else ""
    return (
        f"The axis is cut (triangles), so that the other values can be read: {named}{more} ({y})."
    )


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


def _in_time(line: Line) -> Line:
    """At most about ``POINTS`` points, of as much time each: means by the time of each value.

    The many steps of a short while are one point then, not a spike each.
    """
    first, last = line.points[0][0], line.points[-1][0]
    width = max((last - first) / POINTS, 1e-9)
    groups: dict[int, list[tuple[float, float, float]]] = {}
    before = first
    for at, value in line.points:
        groups.setdefault(int((at - first) / width), []).append((at, value, at - before))
        before = at
    return Line(line.name, [(group[-1][0], _mean(group)) for group in groups.values()])


def _mean(group: Sequence[tuple[float, float, float]]) -> float:
    """Of the values, by their time; of the first point alone, which has none, its value."""
    whole = sum(seconds for *_, seconds in group)
    if not whole:
        return sum(value for _, value, _ in group) / len(group)
    return sum(value * seconds for _, value, seconds in group) / whole


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
