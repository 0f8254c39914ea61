"""Scores of rows at hidden 5120 and 151,936 columns, by the precision of the head.

``teachers.rows.RowScores`` as in an engine's worker: log-probabilities of the sampled token and of
the 64 best and their rest. Three heads, all from the same bfloat16 numbers:

    bfloat16           products and logits in bfloat16: the engine's own head without head_dtype
    float32_logits     bfloat16 products, float32 logits
    float32_head       weights and states as float32: vLLM's ``head_dtype: float32``

    worst_nats, mean_nats   error of the sampled token's log-probability against float64
    best_nats               worst error of a log-probability among the 64 best
    ms                      time of all rows
    head_gib                memory of the head's weights
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import numpy as np
import torch

from async_opd.tools.qualify.measurements.measuring import (
    GIB,
    Figures,
    Report,
    Skip,
    milliseconds,
    peak_gib,
)
from teachers.rows import RowScores

TOP_K = 64
SIZES = {"cuda": (4096, 5120, 151_936), "cpu": (64, 128, 2048)}
"""Rows, hidden size, vocabulary."""
EXACT = 128
"""Rows that are computed in float64 as well."""
LARGEST = 20.0
"""About the largest logit of a row, as trained models have them; a bfloat16 has steps of 0.125 from
16 on."""
Logits = Callable[[torch.Tensor], torch.Tensor]


def head(kind: str, weight: torch.Tensor) -> tuple[Logits, torch.Tensor]:
    """From states to logits, and the weights that it holds. Skip where the device lacks it."""
    if kind == "bfloat16":
        return lambda states: states @ weight.t(), weight
    if kind == "float32_logits":
        if weight.device.type != "cuda":
            raise Skip("products with float32 results of bfloat16 matrices need a GPU")
        return lambda states: torch.mm(states, weight.t(), out_dtype=torch.float32), weight
    full = weight.float()
    return lambda states: states.float() @ full.t(), full


HEADS = ("bfloat16", "float32_logits", "float32_head")


class Rows:
    """States, a head's weights, sampled tokens, and their exact log-probabilities."""

    def __init__(self, device: torch.device) -> None:
        rows, hidden, self.vocabulary = SIZES[device.type]
        torch.manual_seed(0)
        self.states = torch.randn(rows, hidden, device=device, dtype=torch.bfloat16)
        weight = torch.randn(self.vocabulary, hidden, device=device, dtype=torch.bfloat16)
        # the largest of V standard normal numbers is about (2 ln V) ** 0.5
        scale = LARGEST / (2 * np.log(self.vocabulary)) ** 0.5 / hidden**0.5
        self.weight = weight.mul_(scale)
        shape = (rows, 1)
        self.ids = torch.randint(0, self.vocabulary, shape, dtype=torch.int64).to(device)
        self.ids[: rows // 2] = self._likely(rows // 2)
        exact = self.states[:EXACT].double() @ self.weight.double().t()
        self.exact = exact.log_softmax(-1)

    def _likely(self, rows: int) -> torch.Tensor:
        """The most probable token of each row: sampled tokens are among such."""
        return (self.states[:rows] @ self.weight.t()).argmax(-1, keepdim=True)

    def measure(self, kind: str) -> Figures:
        """Errors, time and memory of one head."""
        logits, weights = head(kind, self.weight)
        scores = RowScores(logits, self.vocabulary)
        device = self.states.device

        def work() -> torch.Tensor:
            return scores.score(self.states, self.ids, TOP_K)

        bits = work()[:EXACT]
        found = bits[:, : 1 + TOP_K].contiguous().view(torch.float32).double()
        best = bits[:, -TOP_K:].long()
        error = (found[:, :1] - self.exact.gather(1, self.ids[:EXACT])).abs()
        best_error = (found[:, 1:] - self.exact.gather(1, best)).abs()
        return {
            "worst_nats": float(error.max()),
            "mean_nats": float(error.mean()),
            "best_nats": float(best_error.max()),
            "ms": milliseconds(device, work, repeats=5, warm_up=1),
            "peak_gib": peak_gib(device, work),
            "head_gib": weights.numel() * weights.element_size() / GIB,
        }


def main(report: Report) -> None:
    """See the module."""
    device = report.device
    rows, hidden, vocabulary = SIZES[device.type]
    made = Rows(device)
    for kind in HEADS:
        report.cell(
            partial(made.measure, kind), head=kind, rows=rows, hidden=hidden, vocabulary=vocabulary
        )
