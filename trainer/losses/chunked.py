"""Loss and gradients from hidden states, with one chunk of logits in memory at a time.

    hidden [N, H] ──rows of a chunk──► logits [n, V] ──objective──► ∂loss/∂logits, in place
                                            ▲                          │         │
                                       head's weight          grad hidden rows   + grad weight

The forward pass computes the gradients too; the backward pass only scales them. Logits, their
softmax and their gradient share one buffer of ``CHUNK_BYTES``; the objective works on tiles of it
that fit a processor's cache, or on whole chunks where it is compiled (``compiled.py``). An
objective that weighs whole responses needs another pass over the chunks before, in the same buffer.

The log-sum-exp and everything after it is float32 (or float64), whatever type the matrix products
have. On a GPU logits are float32 sums of bfloat16 products, never rounded to bfloat16: so are those
of the engines (``engine.head_dtype``), in vLLM by the same call. On a CPU a bfloat16 product is.

Before the softmax, logits are scaled and soft capped:

    x ──tanh, where there is a soft cap──► ──scale──► y = scale · cap · tanh(x / cap)
    ∂loss/∂x ◄── · (scale - y² / (scale · cap²)) ──── ∂loss/∂y

Importance weights of whole responses need their log-ratios:

    logits of a chunk ──► log q of the sampled tokens ─┐ all chunks
                                        log mu ────────┴──► Σ log q/mu of each response

Loss and gradient of a chunk are computed together, and a response may lie in several chunks:
therefore these sums take a separate pass over the chunks, before the pass that computes
gradients. It costs one more product of hidden states and head, beside three for loss and gradients.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Any, Protocol

import torch
from torch.autograd.function import once_differentiable

from async_opd.models.lm_head import LogitShape
from trainer.losses.base import Recorded, TeacherStates, Tokens
from trainer.losses.compiled import ObjectiveRun
from trainer.losses.objective import Objective
from trainer.losses.recorded import most_probable, normalized
from trainer.losses.report import GRADIENT, Metrics, concat_metrics

Sum = Callable[[torch.Tensor], None]
"""Sums a tensor over all ranks that share a micro-batch, in place."""


def log_sampled(logits: torch.Tensor, targets: torch.Tensor, temperature: float) -> torch.Tensor:
    """log q of the targets [n] at this temperature, in nats; overwrites the logits [n, V]."""
    if temperature != 1:
        logits.div_(temperature)
    peak = logits.amax(-1, keepdim=True)
    sampled = logits.gather(-1, targets[:, None]) - peak
    mass = logits.sub_(peak).exp_().sum(-1, keepdim=True)
    return (sampled - mass.log())[:, 0]


def response_sums(
    values: torch.Tensor, starts: torch.Tensor, of: int | None = None, over_ranks: Sum | None = None
) -> torch.Tensor:
    """For each token the sum of the values [N] over its response, [N] float64.

    ``starts`` int64 [N] is the row of the first token of its response. Where ranks share the
    micro-batch, it is the row among the ``of`` tokens of all ranks, which call this together.
    """
    sums = values.new_zeros(len(values) if of is None else of, dtype=torch.float64)
    sums.index_add_(0, starts, values.double())
    if over_ranks is not None:
        over_ranks(sums)
    return sums[starts]


PLAIN = LogitShape()
"""The shape that changes no logit."""


def shape_logits(logits: torch.Tensor, shape: LogitShape) -> torch.Tensor:
    """Shapes the logits in place, of any dimensions; returns them."""
    factor = shape.scale
    if shape.soft_cap is not None:
        logits.div_(shape.soft_cap).tanh_()
        factor *= shape.soft_cap
    return logits if factor == 1 else logits.mul_(factor)


def slope_of(shaped: torch.Tensor, shape: LogitShape) -> torch.Tensor | float:
    """∂shaped/∂plain, from shaped logits: a new tensor of their shape, or one number for all."""
    if shape.soft_cap is None:
        return shape.scale
    return shaped.square().div_(-shape.scale * shape.soft_cap**2).add_(shape.scale)


CHUNK_BYTES = {"cpu": 256 << 20, "cuda": 1 << 30}
"""Bytes of the logits in memory at a time, the teacher's included. Each chunk reads and writes the
head's gradient once: on a GPU, with less than about a thousand rows a chunk, that would cost more
than the matrix products."""


class Head(Protocol):
    """A teacher's head: from hidden states [n, H] to logits [n, V_teacher]."""

    @property
    def vocabulary(self) -> int:
        """V_teacher."""
        ...

    def logits(self, states: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
        """Writes the logits into the first n rows of ``out`` and returns these rows."""
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
    over_ranks: Sum | None = None,
) -> tuple[torch.Tensor, Metrics]:
    """The loss (a scalar with gradient) of hidden rows [N, H] under a head [V, H], and metrics [N].

    ``heads`` are the teachers', for objectives over the whole vocabulary. ``compute`` is the type
    of the matrix products; by default the promoted type of ``hidden`` and ``weight``. ``shape`` is
    how the model scales and caps the head's logits. ``over_ranks`` where ranks share the
    micro-batch.
    """
    differentiable = [t for t in (hidden, weight, bias) if t is not None and t.requires_grad]
    wanted = torch.is_grad_enabled() and bool(differentiable)
    chunk_pass = _ChunkPass(
        objective,
        replace(tokens, recorded=None),
        heads or {},
        compute or torch.promote_types(hidden.dtype, weight.dtype),
        shape,
        tuple(wanted and t is not None and t.requires_grad for t in (hidden, weight, bias)),
        over_ranks,
        tokens.recorded,
    )
    loss: torch.Tensor = _ChunkedLoss.apply(hidden, weight, bias, chunk_pass)  # type: ignore[no-untyped-call]
    return loss, chunk_pass.metrics


def head_logits(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    *,
    compute: torch.dtype | None = None,
    shape: LogitShape = PLAIN,
) -> torch.Tensor:
    """Logits [N, V] of few hidden rows, as ``chunked_loss`` computes them; without gradient."""
    compute = compute or torch.promote_types(hidden.dtype, weight.dtype)
    precise = torch.promote_types(compute, torch.float32)
    out = hidden.new_empty((len(hidden), weight.shape[0]), dtype=precise)
    with torch.no_grad(), torch.autocast(hidden.device.type, enabled=False):
        project(hidden.to(compute), weight.to(compute), bias, out)
        return shape_logits(out, shape)


class _ChunkedLoss(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden: Any, weight: Any, bias: Any, run: _ChunkPass) -> torch.Tensor:
        with torch.autocast(hidden.device.type, enabled=False):
            loss, gradients = run(hidden, weight, bias)
        # Freed by the backward pass: attributes of ctx live as long as the loss, and the head's
        # gradient is the largest tensor of a step.
        ctx.save_for_backward(*gradients)
        return loss

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, scale: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        gradients = (None if g is None else g * scale.to(g.dtype) for g in ctx.saved_tensors)
        return *gradients, None


@dataclass
class _ChunkPass:
    """One pass over the chunks, and the metrics [N] of it; of ``recorded`` rows further values.

    ``wanted`` says of hidden, weight and bias whether its gradient is computed. ``scratch`` holds
    the teachers' logits of one chunk of at most ``count`` rows.
    """

    objective: Objective
    tokens: Tokens
    heads: Mapping[str, Head]
    compute: torch.dtype
    shape: LogitShape
    wanted: tuple[bool, ...]
    over_ranks: Sum | None = None
    recorded: Recorded | None = None
    top: list[Metrics] = field(default_factory=list, init=False)
    count: int = field(init=False)
    scratch: torch.Tensor = field(init=False)
    metrics: Metrics = field(init=False)

    def __call__(
        self, hidden: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None
    ) -> tuple[torch.Tensor, list[torch.Tensor | None]]:
        """The loss, and its gradients by hidden, weight and bias; None where it is not wanted."""
        precise = torch.promote_types(self.compute, torch.float32)
        sums = [
            torch.zeros_like(t, dtype=precise) if t is not None and want else None
            for t, want in zip((hidden, weight, bias), self.wanted, strict=True)
        ]
        matrix = weight.to(self.compute)
        own = weight.shape[0] * (1 if self.shape.soft_cap is None else 2)  # slope_of has its own
        widest = max((head.vocabulary for head in self.heads.values()), default=0)
        row = (own + widest) * precise.itemsize
        self.count = min(max(CHUNK_BYTES[hidden.device.type] // row, 1), len(hidden))
        logits = hidden.new_empty((self.count, weight.shape[0]), dtype=precise)
        self.scratch = logits.new_empty(self.count * widest)
        if self.objective.needs_response_ratios:
            ratios = self._response_log_ratios(hidden, matrix, bias, logits)
            self.tokens = replace(self.tokens, response_log_ratios=ratios)
        reports = []
        for rows, states in chunks(self.tokens, self.count):
            part = hidden[rows].to(self.compute)
            out = project(part, matrix, bias, logits)
            reports.append(self._losses(out, rows, states))
            _accumulate(sums, rows, out, part, matrix)
        self.metrics = concat_metrics(reports) | concat_metrics(self.top)
        if reports and sums[0] is not None:
            self.metrics[GRADIENT] = torch.linalg.vector_norm(sums[0], dim=-1)
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

        ValueError for tokens without ``response_starts``.
        """
        tokens, temperature = self.tokens, self.objective.temperature
        if tokens.response_starts is None:
            raise ValueError("weights of whole responses need Tokens.response_starts")
        log_ratios = -tokens.rollout_logprobs.double()
        for rows, _ in chunks(tokens, self.count):
            out = project(hidden[rows].to(self.compute), weight, bias, logits)
            shaped = shape_logits(out, self.shape)
            log_ratios[rows] += log_sampled(shaped, tokens.targets[rows], temperature)
        return response_sums(log_ratios, tokens.response_starts, tokens.of, self.over_ranks)

    def _losses(self, logits: torch.Tensor, rows: slice, states: TeacherStates | None) -> Metrics:
        """Overwrites a chunk's logits by their gradient, tile by tile; returns the values [n]."""
        teacher = None if states is None else self._teacher(states, rows)
        run = objective_run(self.objective, logits.device.type)
        step = run.tile_rows(logits, self.tokens.part(rows), teacher)
        reports = []
        for start in range(0, len(logits), step):
            tile = slice(start, min(start + step, len(logits)))
            tokens = self.tokens.part(slice(rows.start + tile.start, rows.start + tile.stop))
            shaped = shape_logits(logits[tile], self.shape)
            slope = slope_of(shaped, self.shape)
            given = shaped, tokens, None if teacher is None else teacher[tile]
            reports.append(self._values(run, given, rows.start + start))
            if not isinstance(slope, float) or slope != 1:  # from shaped to plain logits
                shaped.mul_(slope)
        return concat_metrics(reports)

    def _values(
        self, run: ObjectiveRun, given: tuple[torch.Tensor, Tokens, torch.Tensor | None], start: int
    ) -> Metrics:
        """The objective's values of a tile, whose first row is ``start``; overwrites its logits."""
        if self.recorded is None:
            return run(*given)
        recorded = self.recorded.part(slice(start, start + len(given[1])))
        top = most_probable(*given, recorded)
        values = run(*given)
        self.top.append(normalized(top, values, given[2], recorded))
        return values

    def _teacher(self, states: TeacherStates, rows: slice) -> torch.Tensor:
        """The teacher's logits [n, V_teacher] of a chunk, in the scratch buffer."""
        head = self.heads[states.teacher]
        part = states.states[rows.start - states.start : rows.stop - states.start]
        out = self.scratch[: len(part) * head.vocabulary].view(len(part), head.vocabulary)
        return head.logits(part, out)


def chunks(tokens: Tokens, count: int) -> Iterator[tuple[slice, TeacherStates | None]]:
    """Runs of at most ``count`` rows with their hidden states; no run spans two teachers."""
    whole: list[tuple[slice, TeacherStates | None]] = [(slice(0, len(tokens)), None)]
    for rows, states in [(one.rows, one) for one in tokens.teacher_states] or whole:
        for start in range(rows.start, rows.stop, max(count, 1)):
            yield slice(start, min(start + count, rows.stop)), states


def project(
    rows: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, out: torch.Tensor
) -> torch.Tensor:
    """Writes rows [n, H] times weight [V, H] transposed, plus bias, into n rows of ``out``."""
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
    """Adds a chunk's part of the gradients of hidden rows, head and bias, from ∂loss/∂logits."""
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


@lru_cache(maxsize=8)
def objective_run(objective: Objective, device: str) -> ObjectiveRun:
    """How the objective runs on the device; the same at every call."""
    return ObjectiveRun.on(objective, device)
