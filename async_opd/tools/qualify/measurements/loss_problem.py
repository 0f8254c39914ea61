"""The same loss twice: in chunks with its own gradient, and by autograd over all logits."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from trainer.losses.base import TeacherStates, Tokens
from trainer.losses.chunked import chunked_loss
from trainer.losses.kl import ForwardKL
from trainer.losses.objective import Objective
from trainer.losses.terms import OnTopK, OnVocabulary

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
