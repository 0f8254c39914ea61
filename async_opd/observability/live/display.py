"""Draws a run's state in the width and height of a terminal: pools, queue, curves, messages.

A text that is too long ends with … behind a whole word. Lines beyond the height are left out: rows
of curves and topics first, then pools, of which the number is shown.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rich.cells import cell_len, set_cell_size
from rich.console import Console, ConsoleOptions, RenderResult
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from async_opd.observability.live.view_state import CurveRow, PoolRow, ViewState, bar, sparkline
from async_opd.observability.terminal import rate, share

BAR, CURVE = 10, 12
"""Characters of a bar and of a curve."""
NAME = 22
"""Characters of the longest name."""
WIDE = 120
"""Columns from which a pool's line has curves."""
FEWEST_POOLS = 4


@dataclass(frozen=True)
class Display:
    """The state as rich draws it."""

    state: ViewState

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """Everything that fits into the terminal, from top to bottom."""
        state, width = self.state, options.max_width
        rows = console.size.height - 1  # the cursor's own line
        fewest = min(len(state.pools), FEWEST_POOLS)
        newest = state.messages[-max(rows - fewest - 4, 1) :]
        messages = [Text(fit(text, width), style="dim") for text in newest]
        pools = state.pools[: max(fewest, rows - len(messages) - 12)]
        left = len(state.pools) - len(pools)
        yield _progress(state)
        yield _pools(pools, width, state.ended)
        if left:
            yield Text(f"and {left} more pools", style="dim")
        rows -= 4 + len(pools) + bool(left) + len(messages)
        topics = _topics(state, width)
        curves = _curves(state.curves, width)
        room = max(rows - 2, 0)
        shown = [
            topics[: max(room // 2, room - len(curves))],
            curves[: max(room - min(len(topics), room // 2), 0)],
            [Text(fit(facts, width))] if (facts := _facts(state)) else [],
            messages,
        ]
        apart = room - sum(map(len, shown[:2])) >= len(shown)
        for part in filter(None, shown):
            if apart:
                yield Text("")
            yield from part


def fit(text: str, width: int) -> str:
    """The text's first line in at most ``width`` columns, ending with … behind a whole word.

    A word that is longer than the width is cut.
    """
    line, *others = text.split("\n", 1)
    if cell_len(line) <= width and not others:
        return line
    cut = set_cell_size(line, max(width - 2, 0)).rstrip()
    if not line[len(cut) : len(cut) + 1].isspace() and len(cut) < len(line):
        cut = cut.rpartition(" ")[0].rstrip() or cut
    return set_cell_size(f"{cut} …", min(cell_len(f"{cut} …"), max(width, 1)))


def _progress(state: ViewState) -> Table:
    grid = Table.grid(padding=(0, 1), expand=True)
    grid.add_column(no_wrap=True)
    grid.add_column(ratio=1)
    grid.add_column(no_wrap=True)
    completed = ProgressBar(total=state.steps, completed=min(state.step, state.steps))
    grid.add_row(f"step {state.step}/{state.steps}", completed, state.times)
    return grid


def _pools(pools: Sequence[PoolRow], width: int, ended: bool) -> Table:
    """One line a pool; curves of busy share and tokens/s in a wide terminal."""
    name = max(min(max(cell_len(pool.name) for pool in pools), NAME), len("pool"))
    wide = width >= WIDE
    curve = CURVE + (width - WIDE) // 8 if wide else 0
    taken = name + BAR + 5 + 9 + 10 + 5 + (2 * curve + 2 if wide else 0)
    table = Table.grid(padding=(0, 1, 0, 0))
    for size, side in (
        (name, "left"),
        (BAR, "left"),
        (4, "right"),
        *([(curve, "left")] if wide else []),
        (8, "right"),
        *([(curve, "left")] if wide else []),
        (9, "right"),
        (max(width - taken, 9), "left"),
    ):
        table.add_column(width=size, justify=side, no_wrap=True)  # type: ignore[arg-type]
    busy, speed = ("mean busy", "mean t/s") if ended else ("busy", "tokens/s")
    head = ["pool", busy, "", "", speed, "", "in flight", "waits for"]
    _add(table, head, wide, style="bold")
    for pool in pools:
        cells: list[Text | str] = [
            Text(fit(pool.name, name)),
            Text(bar(pool.busy, BAR), style="cyan"),
            share(pool.busy),
            Text(sparkline(pool.busy_curve.means, curve), style="cyan"),
            rate(pool.tokens_per_s),
            Text(sparkline(pool.tokens_curve.means, curve), style="green"),
            "-" if pool.in_flight is None else f"{pool.in_flight:.0f}",
            Text(fit(pool.waits_for, max(width - taken, 9)), style="yellow"),
        ]
        _add(table, cells, wide)
    return table


def _add(table: Table, cells: Sequence[Text | str], wide: bool, style: str = "") -> None:
    shown = [cell for at, cell in enumerate(cells) if wide or at not in (3, 5)]
    table.add_row(*shown, style=style)


def _topics(state: ViewState, width: int) -> list[Text]:
    """A bar a topic: its samples of the most that it can have, ready and leased."""
    if not state.topics:
        return []
    most = max(state.topic_samples, 1)
    entries = [
        (row.name, bar((row.ready + row.leased) / most, BAR), f"{row.ready:.0f} + {row.leased:.0f}")
        for row in state.topics
    ]
    title = f"queue, ready + leased samples, bars up to {most}"
    return [Text(fit(title, width), style="bold"), *_columns(entries, "magenta", width)]


def _curves(rows: Sequence[CurveRow], width: int) -> list[Text]:
    """A sparkline a metric, and its newest value."""
    entries = [
        (row.name, sparkline(row.curve.means, CURVE).ljust(CURVE), row.value) for row in rows
    ]
    title = Text(fit("learning", width), style="bold")
    return [title, *_columns(entries, "green", width)] if entries else []


def _columns(entries: Sequence[tuple[str, str, str]], style: str, width: int) -> list[Text]:
    """Entries of a name, a picture and a value, as many beside each other as fit."""
    name = min(max(cell_len(name) for name, _, _ in entries), NAME)
    value = max(cell_len(value) for _, _, value in entries)
    entry = name + len(entries[0][1]) + value + 2
    beside = max((width + 2) // (entry + 2), 1)
    lines = []
    for at in range(0, len(entries), beside):
        line = Text(no_wrap=True, overflow="ellipsis")
        for label, picture, text in entries[at : at + beside]:
            line.append(set_cell_size(fit(label, name), name) + " ")
            line.append(picture, style=style)
            line.append(" " + set_cell_size(text, value + 2))
        line.rstrip()
        lines.append(line)
    return lines


def _facts(state: ViewState) -> str:
    """Numbers that have no curve."""
    return "  ".join(
        f"{label} {form.format(state.metrics[key])}"
        for label, key, form in (
            ("lr", "train/lr", "{:.3g}"),
            ("version", "sync/version", "{:.0f}"),
            ("staleness max", "staleness/max", "{:.0f}"),
            ("dead letters", "ledger/dead_lettered", "{:.0f}"),
            ("sinks failed", "log/sink_failures", "{:.0f}"),
        )
        if key in state.metrics
    )
