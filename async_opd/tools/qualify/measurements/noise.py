"""The noise of a device's kernels in the comparison of held rows (``weight_sync.freshness``).

The trainer's side is ``PlacedStudent.reference``, in float32 master weights under autocast. The
engine's side is the same student in bfloat16, whole, with another kind of attention, as an engine
computes; then with weights that are ``stale`` by steps of AdamW, or in one layer only.

    ratio     mean difference of log-probabilities in nats, in multiples of that which one rounding
              of each module's result makes: a first sync may have 32, a later one 4 times the first
    share     ratio over the limit of a later sync: above 1 it is found
    seconds   of ``PlacedStudent.reference``: two passes
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from async_opd.tools.qualify.measurements.measuring import Figures, Report
from async_opd.tools.qualify.measurements.rank import attend
from async_opd.tools.qualify.measurements.students import micro_batch, rank_of, student
from async_opd.weight_sync.freshness import RowLimits, distances
from async_opd.weight_sync.layout import Reference, held_rows
from trainer.rank import Rank
from trainer.student.reference import ROUNDING

SIZES = {"cuda": ("qwen3-0.6b", 2048), "cpu": ("tiny", 64)}
STEPS, RATE = 4, 1e-5


def engine_of(rank: Rank) -> Any:
    """The weights as they are sent, in a model of their dtype, with transformers' attention."""
    model = copy.deepcopy(rank.model)
    model.set_attn_implementation("sdpa")
    dtype = torch.bfloat16 if rank.student.half else torch.float32
    return model.to(dtype)


@torch.no_grad()
def logprobs(engine: Any, reference: Reference) -> list[Any]:
    """The engine's of each row's compared tokens, one row after the other."""
    found = []
    for row in reference.rows:
        ids = torch.from_numpy(row.ids).long().to(engine.device)
        logits = engine(ids[None], use_cache=False).logits[0, -row.compared - 1 : -1].float()
        chosen = logits.log_softmax(-1).gather(1, ids[-row.compared :, None])[:, 0]
        found.append(chosen.cpu().numpy().astype(np.float32))
    return found


def trained(rank: Rank, tokens: int, steps: int = STEPS) -> None:
    """Steps of AdamW."""
    for _ in range(steps):
        rank.backward([micro_batch(rank, [tokens])])
        rank.apply(RATE)


def main(report: Report) -> None:
    """See the module."""
    device = report.device
    shape, tokens = SIZES[device.type]
    model = student(shape, device)
    attend(model, "auto", device)
    rank = rank_of(model, device)
    rows = held_rows(rank.student.vocabularies.student, 1 << 20)
    limits = RowLimits()

    def compared(engine: Any, learns: bool) -> Figures:
        reference = rank.student.reference(rows)
        rounding = ROUNDING[engine.dtype]
        found = distances(reference, logprobs(engine, reference), rounding)
        if learns:
            limits.learn([found])
        ratio, seconds = found["text"].ratio, reference.seconds
        return {"ratio": ratio, "share": limits.share(found), "seconds": seconds}

    def cell(what: str, engine: Callable[[], Any], learns: bool = False) -> None:
        report.cell(lambda: compared(engine(), learns), what="noise", weights=what, shape=shape)

    cell("the trainer's, first sync", lambda: engine_of(rank), learns=True)
    before = engine_of(rank)
    trained(rank, tokens)
    cell("the trainer's, later sync", lambda: engine_of(rank))
    cell(f"stale by {STEPS} steps", lambda: before)
    mixed = engine_of(rank)
    mixed.model.layers[0].load_state_dict(before.model.layers[0].state_dict())
    cell("one layer stale", lambda: mixed)
    swapped = engine_of(rank)
    first, last = swapped.model.layers[0], swapped.model.layers[-1]
    first.load_state_dict(last.state_dict())
    cell("one layer wrong", lambda: swapped)
