"""Losses of other frameworks on fixed logits, from their documented formulas, in plain numpy.

    python -m tests.tools.importing.oracles.make_oracles > OUT   (oracles.json beside this file)

Nothing of this project and of the other frameworks is imported. A formula gets the student's logits
twice: as they are differentiated, and ``held`` where the original stops the gradient. Gradients
are central differences. Each loss is a mean over the tokens. Clamps that remove gradients are left
out: the import reports them.

q student, p teacher, mu the distribution that was sampled; y sampled token, K a top-k support.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import numpy as np

TOKENS, VOCABULARY, K = 5, 9, 3
STEP = 1e-5
Array = np.ndarray[Any, Any]
Formula = Callable[[Array, Array, "Given"], Array]


class Given:
    """The teacher's logits, sampled tokens and log mu of them; ``stale``: mu is not q."""

    def __init__(self, seed: int = 20261122) -> None:
        random = np.random.default_rng(seed)
        self.student = random.normal(size=(TOKENS, VOCABULARY))
        self.teacher = random.normal(size=(TOKENS, VOCABULARY))
        self.sampled = random.integers(0, VOCABULARY, TOKENS)
        self.log_p = log_softmax(self.teacher)
        on_policy = at(log_softmax(self.student), self.sampled)
        self.log_mu = on_policy
        self.stale = on_policy + 0.2 * random.normal(size=TOKENS)


def log_softmax(logits: Array) -> Array:
    return logits - np.log(np.exp(logits).sum(-1, keepdims=True))


def at(rows: Array, ids: Array) -> Array:
    return np.take_along_axis(rows, ids.reshape(len(rows), -1), -1).reshape(ids.shape)


def top(rows: Array) -> Array:
    return np.argsort(-rows, -1)[:, :K]


def kl(log_a: Array, log_b: Array) -> Array:
    """Σ a (log a - log b) over the columns."""
    return (np.exp(log_a) * (log_a - log_b)).sum(-1)


def with_tail(log_rows: Array) -> Array:
    """One more column: the mass that the others leave."""
    rest = np.log1p(-np.exp(log_rows).sum(-1, keepdims=True))
    return np.concatenate([log_rows, rest], -1)


def jsd(log_p: Array, log_q: Array, beta: float) -> Array:
    """GKD, arXiv:2306.13649, equation 2, and its ends as TRL documents them."""
    if beta == 0:
        return kl(log_p, log_q)
    if beta == 1:
        return kl(log_q, log_p)
    mixture = np.log(beta * np.exp(log_p) + (1 - beta) * np.exp(log_q))
    return beta * kl(log_p, mixture) + (1 - beta) * kl(log_q, mixture)


def gap(logits: Array, x: Given) -> Array:
    """log q(y) - log p(y)."""
    return at(log_softmax(logits), x.sampled) - at(x.log_p, x.sampled)


# verl (docs/algo/opd.md): D of the sampled token, supervised or as the reward of a policy gradient


def verl_policy_gradient(logits: Array, held: Array, x: Given) -> Array:
    """- A · q(y)/q_old(y) with A = -k1, bounded by loss_max_clamp; q_old is q before the step."""
    advantage = -np.clip(gap(held, x), -10, 10)
    ratio = np.exp(at(log_softmax(logits), x.sampled) - at(log_softmax(held), x.sampled))
    return -advantage * ratio


def verl_k2(logits: Array, held: Array, x: Given) -> Array:
    return gap(logits, x) ** 2 / 2


def verl_k3(logits: Array, held: Array, x: Given) -> Array:
    return np.exp(-gap(logits, x)) - 1 + gap(logits, x)


def verl_abs(logits: Array, held: Array, x: Given) -> Array:
    return np.abs(gap(logits, x))


def on_teacher(logits: Array, x: Given) -> tuple[Array, Array]:
    ids = top(x.log_p)
    return at(x.log_p, ids), at(log_softmax(logits), ids)


def on_student(logits: Array, held: Array, x: Given) -> tuple[Array, Array]:
    ids = top(held)
    return at(x.log_p, ids), at(log_softmax(logits), ids)


def forward_topk(logits: Array, held: Array, x: Given) -> Array:
    """verl's forward_kl_topk; AsyncOPD's forward_kl on the teacher's top-k."""
    return kl(*on_teacher(logits, x))


def forward_topk_tail(logits: Array, held: Array, x: Given) -> Array:
    """verl's forward_kl_topk_tail; TRL's forward KL with a tail bucket."""
    log_p, log_q = on_teacher(logits, x)
    return kl(with_tail(log_p), with_tail(log_q))


def reverse_topk(logits: Array, held: Array, x: Given) -> Array:
    """AsyncOPD's reverse_kl on the teacher's top-k."""
    log_p, log_q = on_teacher(logits, x)
    return kl(log_q, log_p)


def reverse_student_topk(logits: Array, held: Array, x: Given) -> Array:
    """verl's reverse_kl_topk; AsyncOPD's reverse_kl_rollout_student_topk."""
    log_p, log_q = on_student(logits, held, x)
    return kl(log_q, log_p)


# TRL: generalized JSD over the vocabulary, or over K tokens with the rest as one more, or scaled


def gkd(beta: float) -> Formula:
    return lambda logits, held, x: jsd(x.log_p, log_softmax(logits), beta)


def trl_reverse_student_topk(tail: bool) -> Formula:
    def loss(logits: Array, held: Array, x: Given) -> Array:
        log_p, log_q = on_student(logits, held, x)
        if tail:
            return jsd(with_tail(log_p), with_tail(log_q), 1)
        return jsd(log_softmax(log_p), log_softmax(log_q), 1)

    return loss


def trl_reverse_sampled(logits: Array, held: Array, x: Given) -> Array:
    """The support is the sampled token (reverse_kl_top_1_mode), with a tail."""
    ids = x.sampled[:, None]
    log_p, log_q = at(x.log_p, ids), at(log_softmax(logits), ids)
    return jsd(with_tail(log_p), with_tail(log_q), 1)


# prime-rl (docs/algorithms.md): - sg(log p - log q) · q/mu of the sampled token


def prime_rl(logits: Array, held: Array, x: Given) -> Array:
    ratio = np.exp(at(log_softmax(logits), x.sampled) - x.stale)
    return gap(held, x) * ratio


# AsyncOPD (arXiv:2606.24143): the expectations of its estimates from several samples a position


def multi_sample_policy_gradient(logits: Array, held: Array, x: Given) -> Array:
    """E over v ~ q of - sg(log p(v) - log q(v)) · q(v)/q_old(v)."""
    log_q, log_old = log_softmax(logits), log_softmax(held)
    return (np.exp(log_old) * -(x.log_p - log_old) * np.exp(log_q - log_old)).sum(-1)


def multi_sample_forward(logits: Array, held: Array, x: Given) -> Array:
    """E over v ~ p of log p(v) - log q(v); also its dense forward KL of hidden states."""
    return kl(x.log_p, log_softmax(logits))


# NeMo-RL: both sides scaled to sum to 1 over the teacher's top-k


def nemo_rl(kind: str, weight: float = 0.5) -> Formula:
    def loss(logits: Array, held: Array, x: Given) -> Array:
        log_p, log_q = (log_softmax(rows) for rows in on_teacher(logits, x))
        if kind == "mixed":
            return weight * kl(log_p, log_q) + (1 - weight) * kl(log_q, log_p)
        return kl(log_p, log_q) if kind == "forward" else kl(log_q, log_p)

    return loss


FORMULAS: dict[str, Formula] = {
    "verl_policy_gradient": verl_policy_gradient,
    "verl_k2": verl_k2,
    "verl_k3": verl_k3,
    "verl_abs": verl_abs,
    "forward_topk": forward_topk,
    "forward_topk_tail": forward_topk_tail,
    "reverse_topk": reverse_topk,
    "reverse_student_topk": reverse_student_topk,
    "trl_gkd_0": gkd(0),
    "trl_gkd_half": gkd(0.5),
    "trl_gkd_1": gkd(1),
    "trl_reverse_tail": trl_reverse_student_topk(tail=True),
    "trl_reverse_scaled": trl_reverse_student_topk(tail=False),
    "trl_reverse_sampled": trl_reverse_sampled,
    "prime_rl": prime_rl,
    "multi_sample_policy_gradient": multi_sample_policy_gradient,
    "multi_sample_forward": multi_sample_forward,
    "nemo_rl_forward": nemo_rl("forward"),
    "nemo_rl_reverse": nemo_rl("reverse"),
    "nemo_rl_mixed": nemo_rl("mixed"),
    "nemo_rl_mixed_30": nemo_rl("mixed", 0.3),
}


def gradient(formula: Formula, x: Given) -> Array:
    """Central differences of the mean by each logit."""
    found = np.zeros_like(x.student)
    for index in np.ndindex(*x.student.shape):
        ends = []
        for sign in (1, -1):
            moved = x.student.copy()
            moved[index] += sign * STEP
            ends.append(formula(moved, x.student, x).mean())
        found[index] = (ends[0] - ends[1]) / (2 * STEP)
    return found


def main() -> None:
    x = Given()
    document: dict[str, Any] = {
        "student": x.student.tolist(),
        "teacher": x.teacher.tolist(),
        "sampled": x.sampled.tolist(),
        "log_mu": x.log_mu.tolist(),
        "stale": x.stale.tolist(),
        "losses": {
            name: {
                "value": float(formula(x.student, x.student, x).mean()),
                "gradient": gradient(formula, x).round(9).tolist(),
            }
            for name, formula in FORMULAS.items()
        },
    }
    print(json.dumps(document))


if __name__ == "__main__":
    main()
