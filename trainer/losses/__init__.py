"""Objectives: losses of response tokens, in nats, with their gradients.

The divergences of this list share a file, and so do the estimators of sampled tokens.

``q`` is the student under its current weights, at temperature 1, ``p`` the teacher, at the
temperature ``teachers.<name>.temperature``. Responses were sampled from the student, perhaps under
older weights.

    divergence (forward_kl, reverse_kl, jsd, mixed_kl) ── over top-k or vocabulary ─┐
    estimator (k1, k2, k3, abs, binary_kl) ── of the sampled token ─────────────────┼─► Objective
    reward's surrogate ─────────────────────────────────────────────────────────────┘
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from trainer.losses.base import DivergenceFunction, user_divergence
from trainer.losses.estimators import K1, SampledEstimator
from trainer.losses.kl import ForwardKL, MixedKL, ReverseKL, jsd
from trainer.losses.objective import ClippedSurrogate, Objective
from trainer.losses.terms import MetricsOnly, OnTopK, OnVocabulary, Sampled, Term

if TYPE_CHECKING:
    from async_opd.config.sections.loss import DivergenceConfig, Loss, RewardConfig


def build_objective(
    loss: Loss, reward: RewardConfig | None = None, temperature: float = 1.0
) -> Objective:
    """The objective that a config names; ``temperature`` is the one rollouts are sampled at."""
    from async_opd.config.sections.loss import corrects

    return Objective(
        _term(loss),
        importance_cap=loss.importance_cap if corrects(loss) else None,
        weighs_responses=loss.importance == "sequence",
        exact_when_fresh=loss.importance_when_fresh == "exact",
        surrogate=None
        if reward is None
        else ClippedSurrogate(reward.clip_low, reward.clip_high, reward.dual_clip),
        temperature=temperature,
    )


def _term(loss: Loss) -> Term:
    if loss.weight == 0:
        return Sampled(MetricsOnly())
    if loss.kind == "forward_kl":
        return _over(ForwardKL(), loss)
    if loss.kind == "reverse_kl":
        return _over(ReverseKL(loss.teacher_floor), loss)
    if loss.kind == "jsd":
        return _over(jsd(loss.beta, loss.teacher_floor), loss)
    if loss.kind == "mixed_kl":
        return _over(MixedKL(loss.forward_weight, loss.teacher_floor), loss)
    if loss.kind == "user":
        return _over(user_divergence(loss.function, loss.options), loss)
    floor = -math.inf if loss.teacher_floor is None else loss.teacher_floor
    if loss.kind == "k1":
        return Sampled(K1(loss.clamp), floor)
    return Sampled(SampledEstimator(loss.kind, loss.gradient, loss.clamp), floor)


def _over(divergence: DivergenceFunction, loss: DivergenceConfig) -> Term:
    """The term of a divergence over the support that the config names."""
    if loss.support == "full_vocab":
        return OnVocabulary(divergence, loss.clamp)
    return OnTopK(divergence, loss.tail, loss.clamp, loss.support == "teacher_topk")
