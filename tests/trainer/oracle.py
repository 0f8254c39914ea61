"""Objectives the straightforward way: all logits, log-softmax, autograd, one formula each.

``every_loss`` has the kinds of the config: a new one needs here its formula, and settings in
``EXAMPLES`` where its defaults are a special case. No other test has a list of kinds.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any, Literal, get_args

import torch

from async_opd.config.sections.loss import DivergenceConfig, Loss
from trainer.losses import Objective, OnTopK, OnVocabulary, Term, build_objective
from trainer.losses.base import DivergenceFunction, TeacherStates, Tokens
from trainer.losses.chunked import chunked_loss

Tail = Literal["bucket", "ignore", "renormalize"]
DOUBLE = torch.float64
EXAMPLES: dict[str, dict[str, Any]] = {"jsd": {"beta": 0.3}, "mixed_kl": {"forward_weight": 0.3}}
"""Settings of losses whose defaults are a special case, by kind."""


def every_loss() -> dict[str, Any]:
    """The config class of every kind of loss but a user's, as the config's union has them."""
    kinds = {
        kind: one
        for one in get_args(Loss)
        for kind in get_args(one.model_fields["kind"].annotation)
    }
    return {kind: one for kind, one in kinds.items() if kind != "user"}


def config_of(kind: str, **values: Any) -> Any:
    """The section ``loss`` of a kind."""
    return every_loss()[kind].model_validate({"kind": kind, **EXAMPLES.get(kind, {}), **values})


def _divergence_of(kind: str) -> DivergenceFunction:
    term = build_objective(config_of(kind)).term
    return term.divergence


DIVERGENCES = {
    kind: _divergence_of(kind)
    for kind, one in every_loss().items()
    if issubclass(one, DivergenceConfig)
}
"""The product's functions of log p and log q."""
ESTIMATES = [kind for kind in every_loss() if kind not in DIVERGENCES]


@dataclass(frozen=True)
class Case:
    """Logits [N, V] of a student, log p [N, V] of a teacher, and the tokens with its top-k."""

    logits: torch.Tensor
    teacher: torch.Tensor
    tokens: Any

    def states(self) -> Case:
        """The same teacher as hidden states, of which the head is the identity."""
        return self.having(teacher_ids=None, teacher_states=(TeacherStates("t", 0, self.teacher),))

    def on(self, tail: Tail | None) -> Case:
        """Itself, or by hidden states where the support is the vocabulary."""
        return self.states() if tail is None else self

    def having(self, **tokens: Any) -> Case:
        """The same with other fields of the tokens."""
        return replace(self, tokens=replace(self.tokens, **tokens))

    def log_q(self, temperature: float = 1.0) -> torch.Tensor:
        """Of the targets, [N], by autograd."""
        table = (self.logits / temperature).log_softmax(-1)
        return table.gather(-1, self.tokens.targets[:, None])[:, 0]

    def ratio(self, temperature: float = 1.0) -> torch.Tensor:
        """q over mu of the targets."""
        return (self.log_q(temperature) - self.tokens.rollout_logprobs).exp()


class Identity:
    """A head that gives the states back."""

    def __init__(self, vocabulary: int) -> None:
        self.vocabulary = vocabulary

    def logits(self, states: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
        return out.copy_(states)


def case(
    seed: int = 0, n: int = 6, v: int = 11, k: int = 4, same: bool = False, of: str = "teacher"
) -> Case:
    """Random, float64. ``same``: both have one distribution. ``of``: whose top-k it is."""
    torch.manual_seed(seed)
    logits = torch.randn(n, v, dtype=DOUBLE)
    log_q = logits.log_softmax(-1)
    teacher = log_q if same else torch.randn(n, v, dtype=DOUBLE).log_softmax(-1)
    targets = torch.randint(0, v, (n,))
    ids = (teacher if of == "teacher" else log_q).topk(k, dim=-1).indices
    tokens = Tokens(
        targets=targets,
        rollout_logprobs=log_q.gather(-1, targets[:, None])[:, 0] + 0.3 * torch.randn(n).double(),
        weights=torch.ones(n, dtype=DOUBLE),
        teacher_logprobs=teacher.gather(-1, targets[:, None])[:, 0],
        teacher_ids=ids,
        teacher_topk_logprobs=teacher.gather(-1, ids),
        teacher_rest_logprobs=teacher.scatter(-1, ids, -torch.inf).logsumexp(-1),
        advantages=torch.randn(n, dtype=DOUBLE),
        reward_weights=torch.rand(n, dtype=DOUBLE),
        response_starts=torch.arange(n) // 4 * 4,
    )
    return Case(logits.requires_grad_(), teacher, tokens)


def loss_of(term: Term | Objective, x: Case, logits: torch.Tensor | None = None) -> torch.Tensor:
    """The product's loss; the head is the identity, so that hidden states are logits."""
    return run(term, x, logits)[0]


def run(
    term: Term | Objective, x: Case, logits: torch.Tensor | None = None
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """The product's loss and metrics."""
    objective = Objective(term) if isinstance(term, Term) else term
    logits = x.logits if logits is None else logits
    eye = torch.eye(logits.shape[-1], dtype=logits.dtype)
    heads = {"t": Identity(x.teacher.shape[-1])} if x.tokens.teacher_states else {}
    return chunked_loss(logits, eye, None, objective, x.tokens, heads=heads)


def outcomes(x: Case, tail: Tail | None, logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """log p and log q of every outcome; ``tail`` None: the whole vocabulary."""
    log_q, log_p = logits.log_softmax(-1), x.teacher
    if tail is None:
        return log_p, log_q
    ids = x.tokens.teacher_ids
    p, q = log_p.gather(-1, ids), log_q.gather(-1, ids)
    if tail == "renormalize":
        return p - p.logsumexp(-1, keepdim=True), q - q.logsumexp(-1, keepdim=True)
    if tail == "bucket" and ids.shape[-1] < logits.shape[-1]:
        rest_p, rest_q = (
            rows.scatter(-1, ids, -torch.inf).logsumexp(-1, keepdim=True) for rows in (log_p, log_q)
        )
        return torch.cat([p, rest_p], -1), torch.cat([q, rest_q], -1)
    return p, q


def divergences(
    kind: str, x: Case, tail: Tail | None, logits: torch.Tensor, **values: Any
) -> torch.Tensor:
    """One value a token, [N]."""
    return divergence(config_of(kind, **values), *outcomes(x, tail, logits))


def divergence(loss: Any, log_p: torch.Tensor, log_q: torch.Tensor) -> torch.Tensor:
    """The formula of a divergence, summed over the outcomes."""
    p, q = log_p.exp(), log_q.exp()
    if loss.kind == "forward_kl":
        return (p * (log_p - log_q)).sum(-1)
    if loss.kind == "reverse_kl":
        return (q * (log_q - log_p)).sum(-1)
    if loss.kind == "mixed_kl":
        a = loss.forward_weight
        return ((a * p - (1 - a) * q) * (log_p - log_q)).sum(-1)
    assert loss.kind == "jsd", "a new divergence: its formula"
    m = (loss.beta * p + (1 - loss.beta) * q).log()
    return (loss.beta * p * (log_p - m) + (1 - loss.beta) * q * (log_q - m)).sum(-1)


def estimate(kind: str, log_p: torch.Tensor, log_q: torch.Tensor) -> torch.Tensor:
    """The formula of an estimate of the sampled tokens, [N]."""
    gap, q = log_q - log_p, log_q.exp()
    formulas = {
        "k1": gap,
        "k2": gap**2 / 2,
        "k3": (-gap).exp() - 1 + gap,
        "abs": gap.abs(),
        "binary_kl": q * gap + (1 - q) * ((1 - q) / (1 - log_p.exp())).log(),
    }
    return formulas[kind]


def gradients(*losses: torch.Tensor, by: torch.Tensor) -> list[torch.Tensor]:
    return [torch.autograd.grad(loss, by, retain_graph=True)[0] for loss in losses]


def assert_same(
    loss: torch.Tensor, expected: torch.Tensor, by: torch.Tensor, atol: float = 1e-12
) -> None:
    """Both values, and their gradients."""
    assert torch.allclose(loss, expected, rtol=1e-9, atol=atol)
    ours, theirs = gradients(loss, expected, by=by)
    assert torch.allclose(ours, theirs, atol=atol)


def term(divergence: DivergenceFunction, tail: Tail | None, clamp: float | None = None) -> Term:
    """The product's term over the teacher's top-k, or the vocabulary for ``tail`` None."""
    if tail is None:
        return OnVocabulary(divergence, clamp)
    return OnTopK(divergence, tail, clamp)


def plain(x: Case, tail: Tail | None) -> list[list[tuple[float, float]]]:
    """(p_i, q_i) of every outcome of every token, in plain Python floats."""
    log_p, log_q = outcomes(x, tail, x.logits.detach())
    pairs: Any = zip(log_p.tolist(), log_q.tolist(), strict=True)
    return [[(math.exp(a), math.exp(b)) for a, b in zip(p, q, strict=True)] for p, q in pairs]
