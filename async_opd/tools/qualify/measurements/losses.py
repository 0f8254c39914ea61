"""The chunked loss, beside the matrix products that nothing can do without.

Forward KL over the teacher's top 64 with a bucket for the rest, and over the full vocabulary from
the teacher's hidden states; bfloat16 products, 151,936 columns. Three kinds of cell:

    speed      ``ours_ms`` against ``floor_ms``, the products alone at full size (logits and both
               gradients; for the full vocabulary the teacher's logits too), and against
               ``straightforward_ms``, autograd over all logits. Target: ``floor_ratio`` 1.3.
               ``eager_ms`` is ours with the objective not compiled
    numerics   loss and gradients against the same computation in float64 from the same numbers:
               the largest difference relative to the largest entry, of ours and of the
               straightforward way; in float32 and in bfloat16
    recompiles ragged numbers of rows one after the other: graphs that torch compiled, and seconds
               of the slowest call after the first
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial

import torch

from async_opd.tools.qualify.measurements.measuring import (
    Figures,
    Report,
    Skip,
    finish,
    milliseconds,
    peak_gib,
)
from trainer.losses.base import TeacherStates, Tokens
from trainer.losses.chunked import chunked_loss, objective_run
from trainer.losses.kl import ForwardKL
from trainer.losses.objective import Objective
from trainer.losses.terms import OnTopK, OnVocabulary

CASES = ("topk", "full_vocab")
SIZES = {"cuda": (8192, 151_936, (2560, 5120)), "cpu": (64, 2048, (32, 64))}
"""Tokens, vocabulary, hidden sizes."""
EXACT = {"cuda": 512, "cpu": 32}
"""Tokens that are computed in float64 as well."""
RAGGED = (4096, 17, 1000, 313, 1, 2047, 777, 64)
"""Rows; by the first tile the trainer decides whether the compiled objective is faster."""
TOP_K = 64
TOPK = Objective(OnTopK(ForwardKL(), "bucket", None))
FULL = Objective(OnVocabulary(ForwardKL(), None))


class TeacherHead:
    """A teacher's head that is one matrix."""

    def __init__(self, weight: torch.Tensor) -> None:
        self.weight = weight
        self.vocabulary = len(weight)

    def logits(self, states: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
        """In the states' type, then the output's."""
        if self.weight.dtype == out.dtype:
            return torch.mm(states, self.weight.t(), out=out)
        if out.is_cuda:
            return torch.mm(states, self.weight.t(), out_dtype=out.dtype, out=out)
        return out.copy_(states @ self.weight.t())


@dataclass(frozen=True)
class Problem:
    """Hidden states and head with gradient; tokens; and, for the full vocabulary, a teacher."""

    hidden: torch.Tensor
    weight: torch.Tensor
    tokens: Tokens
    teacher: TeacherHead | None


def problem(
    case: str,
    tokens: int,
    vocabulary: int,
    hidden: int,
    device: str = "cpu",
    dtype: torch.dtype = torch.float32,
) -> Problem:
    """Random: ``topk`` or ``full_vocab``."""
    torch.manual_seed(0)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, device=device, dtype=dtype)

    states, weight = normal(tokens, hidden), normal(vocabulary, hidden).mul_(hidden**-0.5)
    targets = torch.randint(0, vocabulary, (tokens,), device=device)
    known = Tokens(targets, torch.zeros(tokens, device=device), torch.ones(tokens, device=device))
    if case == "topk":
        ids = torch.rand(tokens, 4 * TOP_K, device=device).topk(TOP_K, dim=-1).indices
        ids = ids * (vocabulary // (4 * TOP_K))
        every = torch.randn(tokens, TOP_K + 1, device=device).log_softmax(-1)
        best = every[:, :TOP_K]
        rest = every[:, TOP_K].contiguous()
        known = Tokens(*_head(known), best[:, 0].contiguous(), ids, best.contiguous(), rest)
        return Problem(states.requires_grad_(), weight.requires_grad_(), known, None)
    teacher = TeacherHead(normal(vocabulary, hidden).mul_(hidden**-0.5))
    given = (TeacherStates("t", 0, normal(tokens, hidden)),)
    known = Tokens(*_head(known), teacher_states=given)
    return Problem(states.requires_grad_(), weight.requires_grad_(), known, teacher)


def _head(tokens: Tokens) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    return tokens.targets, tokens.rollout_logprobs, tokens.weights


def ours(x: Problem) -> torch.Tensor:
    """Forward and backward in chunks; the loss."""
    objective = TOPK if x.teacher is None else FULL
    heads = {} if x.teacher is None else {"t": x.teacher}
    loss, _ = chunked_loss(x.hidden, x.weight, None, objective, x.tokens, heads=heads)
    loss.backward()  # type: ignore[no-untyped-call]
    return loss.detach()


def straightforward(x: Problem) -> torch.Tensor:
    """Forward and backward over all logits; the loss."""
    log_q = _logits(x.hidden, x.weight).log_softmax(-1)
    if x.teacher is None:
        loss = _topk(x.tokens, log_q)
    else:
        states = x.tokens.teacher_states[0].states
        log_p = _logits(states, x.teacher.weight).log_softmax(-1)
        loss = torch.nn.functional.kl_div(log_q, log_p, reduction="sum", log_target=True)
    loss.backward()  # type: ignore[no-untyped-call]
    return loss.detach()


def _logits(states: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """At least float32; float64 of float64."""
    logits = states @ weight.t()
    return logits.to(torch.promote_types(logits.dtype, torch.float32))


def _topk(tokens: Tokens, log_q: torch.Tensor) -> torch.Tensor:
    assert tokens.teacher_ids is not None
    assert tokens.teacher_topk_logprobs is not None
    assert tokens.teacher_rest_logprobs is not None
    log_p, log_s = tokens.teacher_topk_logprobs, log_q.gather(-1, tokens.teacher_ids)
    rest_p, rest_q = tokens.teacher_rest_logprobs, torch.log1p(-log_s.exp().sum(-1))
    inside = (log_p.exp() * (log_p - log_s)).sum(-1)
    return (inside + rest_p.exp() * (rest_p - rest_q)).sum()


def difference(x: Problem) -> float:
    """Largest difference of loss and gradients, relative to the largest entry of each."""
    results: list[tuple[torch.Tensor, ...]] = []
    for way in (ours, straightforward):
        x.hidden.grad = x.weight.grad = None
        loss = way(x)
        assert x.hidden.grad is not None
        assert x.weight.grad is not None
        results.append((loss, x.hidden.grad.clone(), x.weight.grad.clone()))
    pairs = zip(*results, strict=True)
    return max(float((a - b).abs().max() / b.abs().max()) for a, b in pairs)


Way = Callable[[Problem], torch.Tensor]


def floor(device: torch.device, x: Problem) -> float:
    """Milliseconds of the products alone."""
    hidden, weight = x.hidden.detach(), x.weight.detach()
    logits = hidden @ weight.t()
    products: list[Callable[[], object]] = [
        lambda: torch.mm(hidden, weight.t(), out=logits),
        lambda: logits @ weight,
        lambda: logits.t() @ hidden,
    ]
    if x.teacher is not None:
        products.append(products[0])
    return sum(milliseconds(device, product) for product in products)


def speed(case: str, sizes: tuple[int, int, int], device: torch.device) -> Figures:
    """Time and memory; the straightforward way may not fit, which ``straightforward`` then says."""
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    x = problem(case, *sizes, device.type, dtype)

    def fresh(way: Way) -> Callable[[], object]:
        def work() -> None:
            x.hidden.grad = x.weight.grad = None
            way(x)

        return work

    found: Figures = {
        "floor_ms": floor(device, x),
        "ours_ms": milliseconds(device, fresh(ours)),
        "ours_peak_gib": peak_gib(device, fresh(ours)),
    }
    found["floor_ratio"] = found["ours_ms"] / found["floor_ms"]
    with eager(x, device):
        found["eager_ms"] = milliseconds(device, fresh(ours))
    try:
        found["straightforward_ms"] = milliseconds(device, fresh(straightforward), repeats=3)
        found["straightforward_peak_gib"] = peak_gib(device, fresh(straightforward))
    except torch.OutOfMemoryError:
        found["straightforward"] = "out of memory"
    return found


@contextmanager
def eager(x: Problem, device: torch.device) -> Iterator[None]:
    """The objective of the problem is not compiled during the block."""
    run = objective_run(TOPK if x.teacher is None else FULL, device.type)
    run.compiled, kept = None, run.compiled
    try:
        yield
    finally:
        run.compiled = kept


def numerics(
    case: str, sizes: tuple[int, int, int], device: torch.device, dtype: torch.dtype
) -> Figures:
    """Errors of loss, gradient of hidden states and gradient of the head."""
    x = problem(case, *sizes, device.type, dtype)
    exact = gradients(straightforward, _double(x))
    found: Figures = {}
    for name, way in (("ours", ours), ("straightforward", straightforward)):
        seen = gradients(way, x)
        for what, one, other in zip(("loss", "hidden", "weight"), seen, exact, strict=True):
            error = (one.double() - other).abs().max() / other.abs().max()
            found[f"{name}_{what}"] = float(error)
    return found


def gradients(way: Way, x: Problem) -> list[torch.Tensor]:
    """Loss, and gradients of hidden states and head."""
    x.hidden.grad = x.weight.grad = None
    loss = way(x)
    assert x.hidden.grad is not None
    assert x.weight.grad is not None
    return [loss, x.hidden.grad.clone(), x.weight.grad.clone()]


def _double(x: Problem) -> Problem:
    """The same numbers in float64."""

    def leaf(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.detach().double().requires_grad_()

    teacher = None if x.teacher is None else TeacherHead(x.teacher.weight.double())
    states = tuple(
        TeacherStates(s.teacher, s.start, s.states.double()) for s in x.tokens.teacher_states
    )
    fields = ("teacher_topk_logprobs", "teacher_rest_logprobs", "teacher_logprobs")
    scores = {name: getattr(x.tokens, name) for name in fields}
    scores = {name: None if s is None else s.double() for name, s in scores.items()}
    return Problem(
        leaf(x.hidden), leaf(x.weight), replace(x.tokens, teacher_states=states, **scores), teacher
    )


def recompiles(
    case: str, vocabulary: int, hidden: int, rows: tuple[int, ...], device: torch.device
) -> Figures:
    """Graphs that torch compiled for so many numbers of rows. Skip where nothing is compiled."""
    if device.type != "cuda":
        raise Skip("the objective is compiled on GPUs only")
    from torch._dynamo.utils import counters

    before, slowest = counters["stats"]["unique_graphs"], 0.0
    for place, count in enumerate(rows):
        x = problem(case, count, vocabulary, hidden, device.type, torch.bfloat16)
        finish(device)
        started = time.perf_counter()
        ours(x)
        finish(device)
        if place:
            slowest = max(slowest, time.perf_counter() - started)
    graphs = counters["stats"]["unique_graphs"] - before
    return {"graphs": graphs, "sizes": len(rows), "slowest_s": slowest}


def main(report: Report) -> None:
    """Needs a GPU with 32 GiB: the straightforward way takes most of it."""
    device = report.device
    tokens, vocabulary, hidden = SIZES[device.type]
    for case in CASES:  # first: nothing is compiled yet
        report.cell(
            partial(recompiles, case, vocabulary, hidden[0], RAGGED, device),
            what="recompiles",
            case=case,
            hidden=hidden[0],
        )
    for width in hidden:
        for case in CASES:
            report.cell(
                partial(speed, case, (tokens, vocabulary, width), device),
                what="speed",
                case=case,
                hidden=width,
                tokens=tokens,
            )
            for dtype in (torch.float32, torch.bfloat16):
                report.cell(
                    partial(numerics, case, (EXACT[device.type], vocabulary, width), device, dtype),
                    what="numerics",
                    case=case,
                    hidden=width,
                    dtype=str(dtype).removeprefix("torch."),
                )
