"""Loss and gradients from hidden states, with one chunk of logits alive at a time.

    hidden [N, H] ──rows of a chunk──► logits [n, V] ──objective──► ∂loss/∂logits, in place
                                            ▲                          │         │
                                       head's weight          grad hidden rows   + grad weight

Everything happens in the forward pass: the backward pass only scales. Logits, their softmax and
their gradient share one buffer of ``CHUNK_BYTES``; the objective works on tiles of it that fit a
processor's cache. On a GPU, tiles are whole chunks and the objective is compiled. One that weighs
whole responses has a pass over the chunks before, in the same buffer (``responses.py``).

The log-sum-exp and everything after it is float32 (or float64), whatever the matrix products are.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import lru_cache
from typing import Any, Protocol

import torch
from torch.autograd.function import once_differentiable

from async_opd.models.lm_head import LogitShape
from trainer.losses.base import TeacherStates, Tokens
from trainer.losses.logits import PLAIN, shape_logits, slope_of
from trainer.losses.objective import Objective
from trainer.losses.responses import log_sampled, response_sums
from trainer.losses.terms import Metrics

CHUNK_BYTES = {"cpu": 256 << 20, "cuda": 1 << 30}
"""Logits alive at the same time, the teacher's included. Each chunk reads and writes the head's
gradient once: on a GPU, below about a thousand rows, that would cost more than the products."""

TILE_BYTES = 16 << 20
"""Logits a processor works on at the same time."""


class Head(Protocol):
    """A teacher's head: hidden states [n, H] to logits [n, V_teacher]."""

    @property
    def vocabulary(self) -> int:
        """V_teacher."""
        ...

    def logits(self, states: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
        """Writes the logits into the first n rows of ``out``, and returns these."""
        ...


def chunked_loss(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    objective: Objective,
    tokens: Tokens,
    *,
    heads: Mapping[str, Head] | None = None,
    compute: torch.dtype | None = None,
    shape: LogitShape = PLAIN,
) -> tuple[torch.Tensor, Metrics]:
    """The loss (a scalar with gradient) of hidden rows [N, H] under a head [V, H], and metrics [N].

    ``heads`` are the teachers', for objectives over the whole vocabulary. ``compute`` is the type
    of the matrix products; by default that of ``hidden`` and ``weight`` together. ``shape`` is what
    the model does to the head's logits.
    """
    differentiable = [t for t in (hidden, weight, bias) if t is not None and t.requires_grad]
    wanted = torch.is_grad_enabled() and bool(differentiable)
    walk = _ChunkPass(
        objective,
        tokens,
        heads or {},
        compute or torch.promote_types(hidden.dtype, weight.dtype),
        shape,
        tuple(wanted and t is not None and t.requires_grad for t in (hidden, weight, bias)),
    )
    loss: torch.Tensor = _ChunkedLoss.apply(hidden, weight, bias, walk)  # type: ignore[no-untyped-call]
    return loss, walk.metrics


class _ChunkedLoss(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden: Any, weight: Any, bias: Any, walk: _ChunkPass) -> torch.Tensor:
        with torch.autocast(hidden.device.type, enabled=False):
            loss, ctx.gradients = walk(hidden, weight, bias)
        return loss

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, scale: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        gradients = (None if g is None else g * scale.to(g.dtype) for g in ctx.gradients)
        return *gradients, None


class _ChunkPass:
    """One pass over the chunks; keeps what each objective's call reports."""

    def __init__(
        self,
        objective: Objective,
        tokens: Tokens,
        heads: Mapping[str, Head],
        compute: torch.dtype,
        shape: LogitShape,
        wanted: tuple[bool, ...],
    ) -> None:
        self._objective = objective
        self._tokens = tokens
        self._heads = heads
        self._compute = compute
        self._shape = shape
        self._wanted = wanted
        self._count = 0
        self._widest = max((head.vocabulary for head in heads.values()), default=0)
        self._scratch: torch.Tensor | None = None  # the teachers' logits of a chunk
        self.metrics: Metrics = {}

    def __call__(
        self, hidden: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None
    ) -> tuple[torch.Tensor, list[torch.Tensor | None]]:
        """The loss, and its gradients by hidden, weight and bias, each where it is wanted."""
        precise = torch.promote_types(self._compute, torch.float32)
        sums = [
            torch.zeros_like(t, dtype=precise) if t is not None and want else None
            for t, want in zip((hidden, weight, bias), self._wanted, strict=True)
        ]
        matrix = weight.to(self._compute)
        own = weight.shape[0] * (1 if self._shape.soft_cap is None else 2)  # slopes, too
        row = (own + self._widest) * precise.itemsize
        self._count = min(max(CHUNK_BYTES[hidden.device.type] // row, 1), len(hidden))
        logits = hidden.new_empty((self._count, weight.shape[0]), dtype=precise)
        if self._objective.weighs_responses:
            ratios = self._response_log_ratios(hidden, matrix, bias, logits)
            self._tokens = replace(self._tokens, response_log_ratios=ratios)
        reports = []
        for rows, states in chunks(self._tokens, self._count):
            part = hidden[rows].to(self._compute)
            out = project(part, matrix, bias, logits)
            reports.append(self._losses(out, rows, states))
            _accumulate(sums, rows, out, part, matrix)
        self.metrics = _joined(reports)
        loss = self.metrics["total"].sum() if reports else hidden.new_zeros((), dtype=precise)
        inputs = (hidden, weight, bias)
        return loss, [
            None if s is None or t is None else s.to(t.dtype)
            for s, t in zip(sums, inputs, strict=True)
        ]

    def _response_log_ratios(
        self,
        hidden: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        logits: torch.Tensor,
    ) -> torch.Tensor:
        """log q/mu of each token's whole response, [N] float64; ``logits`` are overwritten.

        ValueError for tokens that do not say whose response they are part of.
        """
        tokens, temperature = self._tokens, self._objective.temperature
        if tokens.response_starts is None:
            raise ValueError("weights of whole responses need Tokens.response_starts")
        log_ratios = -tokens.rollout_logprobs.double()
        for rows, _ in chunks(tokens, self._count):
            out = project(hidden[rows].to(self._compute), weight, bias, logits)
            shaped = shape_logits(out, self._shape)
            log_ratios[rows] += log_sampled(shaped, tokens.targets[rows], temperature)
        return response_sums(log_ratios, tokens.response_starts)

    def _losses(self, logits: torch.Tensor, rows: slice, states: TeacherStates | None) -> Metrics:
        """Turns a chunk's logits into their gradient, tile by tile."""
        teacher = None if states is None else self._teacher(states, rows, logits)
        run = run_objective(self._objective, logits.device.type)
        step = len(logits)
        if logits.device.type == "cpu":
            step = max(TILE_BYTES // (logits.shape[-1] * logits.itemsize), 1)
        reports = []
        for start in range(0, len(logits), step):
            tile = slice(start, min(start + step, len(logits)))
            tokens = self._tokens.part(slice(rows.start + tile.start, rows.start + tile.stop))
            shaped = shape_logits(logits[tile], self._shape)
            slope = slope_of(shaped, self._shape)
            reports.append(run(shaped, tokens, None if teacher is None else teacher[tile]))
            if not isinstance(slope, float) or slope != 1:
                shaped.mul_(slope)
        return _joined(reports)

    def _teacher(self, states: TeacherStates, rows: slice, logits: torch.Tensor) -> torch.Tensor:
        head = self._heads[states.teacher]
        part = states.states[rows.start - states.start : rows.stop - states.start]
        if self._scratch is None:
            self._scratch = logits.new_empty(self._count * self._widest)
        out = self._scratch[: len(part) * head.vocabulary].view(len(part), head.vocabulary)
        return head.logits(part, out)


def chunks(tokens: Tokens, count: int) -> Iterator[tuple[slice, TeacherStates | None]]:
    """Runs of at most ``count`` rows; none has the hidden states of two teachers."""
    whole: list[tuple[slice, TeacherStates | None]] = [(slice(0, len(tokens)), None)]
    for rows, states in [(one.rows, one) for one in tokens.teacher_states] or whole:
        for start in range(rows.start, rows.stop, max(count, 1)):
            yield slice(start, min(start + count, rows.stop)), states


def project(
    rows: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, out: torch.Tensor
) -> torch.Tensor:
    """rows [n, H] times weight [V, H], plus bias, into the first n rows of ``out``."""
    out = out[: len(rows)]
    if weight.dtype == out.dtype:
        torch.mm(rows, weight.t(), out=out)
    elif out.is_cuda:
        torch.mm(rows, weight.t(), out_dtype=out.dtype, out=out)
    else:
        out.copy_(rows @ weight.t())
    return out if bias is None else out.add_(bias)


def _accumulate(
    sums: list[torch.Tensor | None],
    rows: slice,
    gradient: torch.Tensor,
    hidden: torch.Tensor,
    weight: torch.Tensor,
) -> None:
    """Adds a chunk's ∂loss/∂logits to the gradients of its hidden rows, the head and its bias."""
    of_hidden, of_weight, of_bias = sums
    if of_bias is not None:
        of_bias += gradient.sum(0)
    gradient = gradient.to(weight.dtype)
    if of_hidden is not None:
        of_hidden[rows] = gradient @ weight
    if of_weight is None:
        return
    if of_weight.dtype == weight.dtype:
        of_weight.addmm_(gradient.t(), hidden)
    elif of_weight.is_cuda:
        torch.addmm(of_weight, gradient.t(), hidden, out_dtype=of_weight.dtype, out=of_weight)
    else:
        of_weight += gradient.t() @ hidden


def _joined(reports: list[Metrics]) -> Metrics:
    if len(reports) == 1:
        return reports[0]
    return {name: torch.cat([one[name] for one in reports]) for name in (reports or [{}])[0]}


@lru_cache(maxsize=8)
def run_objective(objective: Objective, device: str) -> Callable[..., Metrics]:
    """The objective itself, or compiled into a few kernels for a GPU; the eager one is its oracle.

    Not yet run on a GPU: the test traces it whole and runs the trace.
    """
    if device == "cpu":
        return objective
    return torch.compile(objective.__call__, dynamic=True, fullgraph=True)
