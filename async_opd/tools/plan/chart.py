"""Charts of throughput by staleness threshold and by split, drawn by altair as one SVG.

The page is transparent and the ink is grey, so that the file reads on light and on dark pages.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from async_opd.tools.plan.advice import Advice

GREY, GRID, LINE, MARK = "#868e96", "#868e9655", "#2f81d6", "#d4691f"


def draw_charts(advice: Advice) -> str:
    """The SVG with both charts side by side. ImportError without the extra ``report``."""
    import altair
    import vl_convert

    threshold = _chart(
        "samples/s by staleness threshold",
        "async.staleness_threshold",
        advice.by_threshold,
        advice.threshold,
        f"{advice.threshold:g} is enough",
    )
    split = _chart(
        f"samples/s by split of {advice.gpus} GPUs",
        "GPUs of the rollout pool, the rest split as well as possible",
        advice.by_rollout,
        advice.rollout_gpus,
        f"best: {advice.rollout_gpus}",
    )
    ink = {f"{part}Color": GREY for part in ("label", "title", "domain", "tick")}
    both = altair.hconcat(threshold, split, background="transparent")
    both = both.configure_axis(**ink, gridColor=GRID).configure_title(color=GREY)
    svg: str = vl_convert.vegalite_to_svg(both.to_dict())
    return svg


def _chart(
    title: str, x_name: str, points: Sequence[tuple[float, float]], mark: float, mark_name: str
) -> Any:
    """A line with a point at each x; a rule with a name at the recommended one, ``mark``."""
    import altair

    data = altair.Data(values=[{"x": x, "y": y} for x, y in points])
    steps = altair.Axis(tickMinStep=1, grid=False)
    line = altair.Chart(data).mark_line(color=LINE, point={"color": LINE, "size": 50})
    best = altair.Chart(altair.Data(values=[{"x": mark, "name": mark_name}]))
    side = "right" if mark > (points[0][0] + points[-1][0]) / 2 else "left"
    name = best.mark_text(align=side, dx=6 if side == "left" else -6, color=MARK)
    return altair.layer(
        line.encode(x=altair.X("x:Q", title=x_name, axis=steps), y=altair.Y("y:Q", title=None)),
        best.mark_rule(color=MARK, strokeDash=[4, 3]).encode(x="x:Q"),
        name.encode(x="x:Q", y=altair.value(6), text="name:N"),
    ).properties(title=title, width=380, height=230)
