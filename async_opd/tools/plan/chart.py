"""Charts of throughput by staleness threshold and by split, as an SVG.

Colours follow the reader's light or dark scheme; the file has no script and no font.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

from async_opd.tools.plan.advice import Advice

WIDTH, HEIGHT = 460, 330
LEFT, RIGHT, TOP, BOTTOM = 62, 18, 52, 52
STYLE = """
svg { --ink: #1f2328; --soft: #656d76; --grid: #d8dee4; --line: #0969da; --mark: #bc4c00;
      --page: #ffffff; font-family: system-ui, sans-serif; font-size: 12px }
@media (prefers-color-scheme: dark) {
  svg { --ink: #e6edf3; --soft: #9198a1; --grid: #30363d; --line: #58a6ff; --mark: #f0883e;
        --page: #0d1117 } }
.page { fill: var(--page) } text { fill: var(--soft) }
.title { fill: var(--ink); font-size: 14px; font-weight: 600 }
.grid { stroke: var(--grid) } .line { stroke: var(--line); stroke-width: 2; fill: none }
.dot { fill: var(--line); stroke: var(--page); stroke-width: 1.5 }
.mark { stroke: var(--mark); stroke-dasharray: 4 3 } .best { fill: var(--mark) }
"""

Points = Sequence[tuple[float, float]]


def draw_charts(advice: Advice) -> str:
    """The SVG with both charts side by side."""
    threshold = _Chart(
        "samples/s by staleness threshold",
        "async.staleness_threshold",
        advice.by_threshold,
        advice.threshold,
        f"{advice.threshold:g} is enough",
    )
    split = _Chart(
        f"samples/s by split of {advice.gpus} GPUs",
        "GPUs of the rollout pool, the rest split as well as possible",
        advice.by_rollout,
        advice.rollout_gpus,
        f"best: {advice.rollout_gpus}",
    )
    size = f'width="{2 * WIDTH}" height="{HEIGHT}" viewBox="0 0 {2 * WIDTH} {HEIGHT}"'
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" {size} role="img">\n'
        f"<title>async_opd plan</title>\n<style>{STYLE}</style>\n"
        f'<rect class="page" width="100%" height="100%"/>\n'
        f"<g>\n{threshold.draw()}\n</g>\n"
        f'<g transform="translate({WIDTH} 0)">\n{split.draw()}\n</g>\n</svg>\n'
    )


@dataclass(frozen=True)
class _Chart:
    """A line with dots; ``mark`` is the recommended x."""

    title: str
    x_name: str
    points: Points
    mark: float
    mark_name: str

    def draw(self) -> str:
        """The SVG elements of the chart, at the origin."""
        parts = [_text(LEFT, 24, self.title, "title"), *self._y_axis(), *self._x_axis()]
        parts += self._mark()
        path = " ".join(f"{self._x(x):.1f},{self._y(y):.1f}" for x, y in self.points)
        parts.append(f'<polyline class="line" points="{path}"/>')
        for x, y in self.points:
            kind = "dot best" if x == self.mark else "dot"
            place = f'cx="{self._x(x):.1f}" cy="{self._y(y):.1f}"'
            tip = f"<title>{x:g}: {y:.4g} samples/s</title>"
            parts.append(f'<circle class="{kind}" {place} r="4">{tip}</circle>')
        return "\n".join(parts)

    def _mark(self) -> list[str]:
        x = self._x(self.mark)
        line = f'<line class="mark" x1="{x:.1f}" x2="{x:.1f}" y1="{TOP}" y2="{HEIGHT - BOTTOM}"/>'
        anchor = "end" if x > WIDTH / 2 else "start"
        return [
            line,
            _text(x + (-6 if anchor == "end" else 6), TOP + 4, self.mark_name, "", anchor),
        ]

    def _y_axis(self) -> list[str]:
        parts = []
        for value in ticks(self._most):
            y = self._y(value)
            parts.append(
                f'<line class="grid" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>'
            )
            parts.append(_text(LEFT - 8, y + 4, f"{value:g}", "", "end"))
        return parts

    def _x_axis(self) -> list[str]:
        middle = (LEFT + WIDTH - RIGHT) / 2
        parts = [_text(middle, HEIGHT - 12, self.x_name, "", "middle")]
        low, high = self.points[0][0], self.points[-1][0]
        values = [value for value in ticks(high) if value >= low] or [low]
        below = HEIGHT - BOTTOM + 18
        return parts + [_text(self._x(x), below, f"{x:g}", "", "middle") for x in values]

    @property
    def _most(self) -> float:
        return max(y for _, y in self.points) * 1.08 or 1.0

    def _x(self, value: float) -> float:
        low, high = self.points[0][0], self.points[-1][0]
        share = (value - low) / (high - low) if high > low else 0.5
        return LEFT + 8 + share * (WIDTH - LEFT - RIGHT - 16)

    def _y(self, value: float) -> float:
        return HEIGHT - BOTTOM - value / self._most * (HEIGHT - TOP - BOTTOM)


def ticks(most: float) -> list[float]:
    """Multiples from 0 to ``most`` of 1, 2 or 5 times a power of ten: four to eight steps."""
    power = 10.0 ** math.floor(math.log10(most / 4))
    step = next(power * digit for digit in (1, 2, 5, 10) if most / (power * digit) <= 8)
    return [round(index * step, 12) for index in range(math.floor(most / step + 1e-9) + 1)]


def _text(x: float, y: float, words: str, kind: str, anchor: str = "start") -> str:
    name = f' class="{kind}"' if kind else ""
    place = f'x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}"'
    return f"<text{name} {place}>{escape(words)}</text>"
