"""The numbers in charts."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from async_opd.tools.report.charts import Chart, Line, lines


def drawn(values: list[float], **how: str) -> Chart:
    chart = lines("k", "T", "Note.", [Line("one", [*enumerate(values, 1)])], y="s", **how)
    assert chart is not None
    return chart


def scale(chart: Chart) -> dict[str, object]:
    """Of the axis of values."""
    layers = (one["encoding"] for one in chart.spec["layer"])
    return dict(next(one["y"]["scale"] for one in layers if "strokeDash" in one))


@pytest.mark.parametrize(
    ("outlying", "end", "shape"),
    [(1650.0, "domainMax", "triangle-up"), (-90.0, "domainMin", "triangle-down")],
)
def test_one_outlying_value_does_not_flatten_the_others_and_is_named(
    outlying: float, end: str, shape: str
) -> None:
    values = [16.0 + index % 3 for index in range(20)]
    values[1] = outlying
    chart = drawn(values)
    assert end in scale(chart)
    assert 15.5 <= float(str(scale(chart)[end])) <= 18.5
    assert f"{outlying:,.4g} at step 2" in chart.note
    marks = [one for one in chart.spec["layer"] if one["mark"].get("shape") == shape]
    assert [one["v"] for one in marks[0]["data"]["values"]] == [outlying]
    assert (f"{outlying:.4g}") in [row[2] for row in chart.rows]


@pytest.mark.parametrize(
    "values",
    [
        [1.0, 1.1, 90.0],  # few
        [*[1.0] * 20, 2.0],  # all others are the same
        [100 / step for step in range(1, 60)],  # falls steeply
        [float(step % 2) for step in range(60)],
    ],
)
def test_values_that_flatten_no_others_are_all_on_the_axis(values: list[float]) -> None:
    chart = drawn(values)
    assert scale(chart) == {"zero": False}
    assert chart.note == "Note."


@given(st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=300), st.booleans())
def test_every_value_is_on_the_axis_or_named_beyond_it(values: list[float], timed: bool) -> None:
    chart = drawn(values, **({"x": "min"} if timed else {}))
    least, most = (float(str(scale(chart).get(k, v))) for k, v in EDGES)
    (marks,) = (one["data"] for one in [chart.spec])
    beyond = [one["y"] for one in marks["values"] if not least <= one["y"] <= most]
    tips = [
        one["v"]
        for layer in chart.spec["layer"]
        if "triangle" in layer["mark"].get("shape", "")
        for one in layer["data"]["values"]
    ]
    assert sorted(tips) == sorted(beyond)
    assert ("axis is cut" in chart.note) == bool(beyond)
    assert len(beyond) <= max(len(values) // 20, 2)


EDGES = (("domainMin", "-inf"), ("domainMax", "inf"))


def test_a_rate_over_time_is_the_mean_of_the_time_and_not_of_the_steps() -> None:
    """Ten steps in 0.1 s after one of 10 s."""
    points = [(0.0, 10.0), (10.0, 10.0), *((10 + at / 100, 1000.0) for at in range(1, 11))]
    points += [(float(at), 10.0) for at in range(11, 240)]
    chart = lines("k", "T", "", [Line("rate", points)], y="samples/s", x="s")
    assert chart is not None
    assert max(one["y"] for one in chart.spec["data"]["values"]) < 120


def test_values_in_thousands_have_no_exponent_on_their_axis() -> None:
    """d3 writes an exponent where a value has more digits than the format has."""
    chart = lines("rate", "Rate", "", [Line("rate", [(1, 100.0), (2, 12_500.0)])], y="samples/s")
    assert chart is not None
    assert '"format": ",.5~g"' in json.dumps(chart.spec)
