"""Writes the tables of docs/scaling.md from ``async_opd/tools/plan/scaling.py``.

python docs/make_scaling.py
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from async_opd.config.sections.loss import ScoreKind
from async_opd.queue.sizes import STORED_FROM, in_mib, rollout_bytes, sample_bytes
from async_opd.tools.plan.scaling import COSTS, Load, limits

PROMPT, RESPONSE = 1024, 8192
TOP_K, HIDDEN, ITEMSIZE = 64, 5120, 2
DECODE, PREFILL, TRAIN = 4000.0, 7500.0, 8000.0
"""Assumed tokens/s of one GPU: the student's responses, scored tokens, trained tokens."""
KINDS: dict[str, ScoreKind] = {
    "sampled token": "sampled",
    "teacher's top 64": "teacher_topk",
    "student's top 64": "student_topk",
    "hidden states": "hidden",
}


def loads() -> Iterator[tuple[str, Load]]:
    """The reference's load by the words for its scores."""
    for words, kind in KINDS.items():
        scores = (kind, TOP_K if kind.endswith("topk") else 0)
        hidden = (HIDDEN, ITEMSIZE) if kind == "hidden" else (0, 0)
        sizes = rollout_bytes(*scores), sample_bytes(*scores, *hidden)
        load = Load(PROMPT, RESPONSE, *sizes, n=4, scored=64, batch=512, ranks=16)
        yield words, load
        if kind != "sampled":
            yield f"{words}, by reference", replace(load, stored_from=STORED_FROM)


def per_gpu() -> float:
    """Samples/s of one GPU of a run whose pools are balanced."""
    tokens = PROMPT + RESPONSE
    return 1 / (RESPONSE / DECODE + tokens / PREFILL + tokens / TRAIN)


def arrow_table() -> Iterator[str]:
    """Bytes on each arrow by kind of scores, and calls."""
    made = dict(loads())
    yield f"| arrow | calls | {' | '.join(made)} |"
    yield "|---|--:|" + "--:|" * len(made)
    columns = [load.arrows() for load in made.values()]
    for row in zip(*columns, strict=True):
        calls = sorted({f"{one.calls:.2g}" for one in row}, key=float)
        cells = [in_mib(round(one.nbytes)) for one in row]
        shown = " to ".join(dict.fromkeys((calls[0], calls[-1])))
        arrow = f"{row[0].content}: {row[0].source} → {row[0].target}"
        yield f"| {arrow} | {shown} | {' | '.join(cells)} |"


def limit_table() -> Iterator[str]:
    """Samples/s and GPUs at which each process binds, by kind of scores."""
    yield "| scores | binds first | samples/s | GPUs | bytes through it | then |"
    yield "|---|---|--:|--:|--:|---|"
    for words, load in loads():
        arrows = load.arrows()
        (first, rate), *rest = limits(arrows).items()
        nbytes = sum(one.nbytes for one in arrows if first in (one.source, one.target))
        moved = f"{in_mib(round(nbytes * rate))}/s"
        then = ", ".join(f"{name} {_gpus(limit)}" for name, limit in rest)
        yield f"| {words} | {first} | {rate:,.3g} | {_gpus(rate)} | {moved} | {then} |"


def _gpus(rate: float) -> str:
    return f"{float(f'{rate / per_gpu():.2g}'):,.0f}"


def cost_table() -> Iterator[str]:
    """CPU time of each process."""
    yield "| process | ms of CPU time a sample | ms a MiB in or out |"
    yield "|---|--:|--:|"
    for name, cost in COSTS.items():
        yield f"| {name} | {cost.sample_ms:g} | {cost.mib_ms:g} |"


PAGE = Path(__file__).with_name("scaling.md")
TABLES = {"arrows": arrow_table, "costs": cost_table, "limits": limit_table}


def document() -> str:
    """The page, with each table between its two marks as the code has it now."""
    page = PAGE.read_text(encoding="utf-8")
    for name, table in TABLES.items():
        before, mark, rest = page.partition(f"<!-- {name} -->\n")
        after = rest.partition("\n<!-- end -->")[2]
        page = before + mark + "\n".join(table()) + "\n<!-- end -->" + after
    return page


if __name__ == "__main__":
    PAGE.write_text(document(), encoding="utf-8")
    sys.stdout.write(f"{PAGE}\n")
