"""The ``loss`` and ``reward`` sections: the objective, its support and its reduction.

The objectives are computed in ``trainer/losses``; docs/objectives.md helps to choose one.
"""

from __future__ import annotations

import difflib
import re
from typing import Any, Literal, Self, TypeVar

from pydantic import Field, model_validator

from async_opd.config.sections.section import Count, Name, Section

Reduction = Literal[
    "token_mean", "seq_mean_token_mean", "seq_mean_token_sum", "seq_mean_token_sum_norm"
]
Support = Literal["teacher_topk", "student_topk", "full_vocab"]


class ObjectiveConfig(Section):
    """Settings of every objective."""

    weight: float = Field(default=1.0, ge=0)
    """Factor of the distillation loss; 0 trains on the reward alone."""
    reduction: Reduction = "token_mean"
    """The loss of a batch: ``token_mean`` (sum over tokens / response tokens of the batch),
    ``seq_mean_token_mean`` (mean over samples of each one's token mean), ``seq_mean_token_sum``
    (mean over samples of each one's sum), ``seq_mean_token_sum_norm`` (that, divided by
    ``rollout.max_tokens``; of episodes times ``environment.max_turns``)."""
    importance: Literal["auto", "off", "truncated", "sequence"] = "auto"
    """``truncated`` weights each token by min(q/mu, ``importance_cap``), q the student now and mu
    the one that sampled it; ``sequence`` weights all tokens of a response alike, by the product of
    q/mu over the response, capped in the same way: prefixes are then corrected too, with far more
    variance. ``auto``: truncated for sampled-token objectives, which are wrong off-policy
    without it; off for divergences, which are exact at each position under any sampling
    distribution. q has the temperature of the rollouts, so that the weight of an on-policy token
    is 1; ``top_p``, ``top_k`` and ``min_p`` of the rollouts are refused."""
    importance_cap: float = Field(default=2.0, ge=1)
    """Truncation of the importance weights."""
    importance_when_fresh: Literal["exact", "as_configured"] = "as_configured"
    """The weight of tokens whose whole response was sampled under the weights that are trained:
    ``exact`` is 1, without the noise of the engines' rounding; ``as_configured`` is that of
    ``importance``, which corrects the rounding too, of a quantized engine above all."""
    mask_truncated: bool = False
    """Excludes responses that were cut off (``finish_reason: length``) from the distillation loss:
    they have no gradient, and are in no denominator of ``reduction`` either."""
    teacher_floor: float | None = Field(default=None, lt=0)
    """Lower bound of the teacher's log-probabilities (nats, as -10), also of the rest of a support:
    a token that the teacher excludes then has a finite loss. Only for losses with the teacher's
    logarithm without its probability: ``reverse_kl``, ``jsd`` with beta 1, ``mixed_kl`` (its
    reverse part), sampled tokens. The student's side is never bounded."""


class DivergenceConfig(ObjectiveConfig):
    """A divergence between the teacher's and the student's distribution at each position."""

    support: Support = "teacher_topk"
    """Outcomes that the divergence sums over: the teacher's ``top_k`` best tokens, the student's
    (chosen when it sampled), or the whole vocabulary (exact, by the teacher's hidden states)."""
    top_k: Count = 64
    """Tokens of a top-k support at each position."""
    tail: Literal["bucket", "ignore", "renormalize"] = "bucket"
    """The mass outside of a top-k support: ``bucket`` makes it one more outcome (a true divergence
    of coarser distributions), ``ignore`` drops it (the sum can be negative), ``renormalize`` scales
    the support to mass 1."""
    clamp: float | None = Field(default=None, gt=0)
    """Tokens with a larger divergence are scaled down to it, with their gradient, which is bounded
    but never removed. The share of such tokens is a metric."""


Bounded = TypeVar("Bounded", bound=ObjectiveConfig)


def _without_floor(loss: Bounded, name: str) -> Bounded:
    if loss.teacher_floor is not None:
        raise ValueError(
            f"{name} needs no teacher_floor: it is finite where the teacher excludes a token; "
            "remove teacher_floor"
        )
    return loss


class ForwardKLConfig(DivergenceConfig):
    """Forward KL(teacher ‖ student): mass covering, and tolerant of stale samples."""

    kind: Literal["forward_kl"] = "forward_kl"

    @model_validator(mode="after")
    def _needs_no_floor(self) -> Self:
        return _without_floor(self, "forward_kl")


class ReverseKLConfig(DivergenceConfig):
    """Reverse KL(student ‖ teacher): mode seeking."""

    kind: Literal["reverse_kl"]


class JSDConfig(DivergenceConfig):
    """Generalized Jensen-Shannon divergence between teacher and student."""

    kind: Literal["jsd"]
    beta: float = Field(default=0.5, ge=0, le=1)
    """Weight of the teacher in the mixture; 0 is forward KL, 1 is reverse KL."""

    @model_validator(mode="after")
    def _needs_no_floor(self) -> Self:
        return self if self.beta == 1 else _without_floor(self, f"jsd with beta {self.beta:g}")


class MixedKLConfig(DivergenceConfig):
    """A weighted sum of forward KL(teacher ‖ student) and reverse KL(student ‖ teacher)."""

    kind: Literal["mixed_kl"]
    forward_weight: float = Field(default=0.5, ge=0, le=1)
    """Weight of forward KL; reverse KL has 1 minus it. NeMo-RL's ``mixed_kl_weight``."""

    @model_validator(mode="after")
    def _needs_no_floor(self) -> Self:
        if self.forward_weight < 1:
            return self
        return _without_floor(self, "mixed_kl with forward_weight 1")


class K1Config(ObjectiveConfig):
    """Reverse KL by the sampled-token estimator k1 = log q - log p, as a policy gradient."""

    kind: Literal["k1"]
    gradient: Literal["policy_gradient"] = "policy_gradient"
    """The estimator is an advantage. A *supervised* k1 is refused: its gradient is that of log q
    alone, in which the teacher does not appear."""
    clamp: float | None = Field(default=None, gt=0)
    """Bounds each token's advantage to [-clamp, clamp]; the share of bounded ones is a metric."""


class SampledConfig(ObjectiveConfig):
    """Another estimate from the sampled token: k2, k3, abs or binary_kl.

    See trainer/losses/estimators.py.
    """

    kind: Literal["k2", "k3", "abs", "binary_kl"]
    gradient: Literal["supervised", "policy_gradient"] = "supervised"
    """``supervised`` differentiates the estimate, ``policy_gradient`` uses its negative as the
    sampled token's advantage."""
    clamp: float | None = Field(default=None, gt=0)
    """Bounds each token's advantage to [-clamp, clamp]; the share of bounded ones is a metric."""

    @model_validator(mode="after")
    def _clamp_is_for_advantages(self) -> Self:
        if self.clamp is not None and self.gradient == "supervised":
            raise ValueError(
                "clamp bounds an advantage; a supervised estimate has none, and clamping the "
                "estimate itself would silently remove the gradient of the clamped tokens"
            )
        return self


class UserDivergenceConfig(DivergenceConfig):
    """A divergence of an installed package of yours. See docs/extending.md."""

    kind: Literal["user"]
    function: Name = Field(min_length=1)
    """``module:function``, or an entry point of the group ``async_opd.losses``: a function of
    log p and log q [n, K] that returns its values [n] and their slopes by log q [n, K]."""
    options: dict[str, Any] = Field(default={})
    """Keyword arguments of the function."""

    @model_validator(mode="after")
    def _bounds_its_own_logarithms(self) -> Self:
        if self.teacher_floor is not None:
            raise ValueError(
                "teacher_floor is not applied to a function of yours: bound log p inside of it, "
                "and remove teacher_floor"
            )
        return self


Divergence = ForwardKLConfig | ReverseKLConfig | JSDConfig | MixedKLConfig
Loss = Divergence | UserDivergenceConfig | K1Config | SampledConfig


class RewardConfig(Section):
    """A task reward for each rollout, with group-relative advantages (GRPO, arXiv:2402.03300)."""

    grader: str = "exact"
    """The grader, as in ``eval.grader``: it gives each finished response a number from 0 to 1."""
    weight: float = Field(default=1.0, gt=0)
    """Factor of the reward's loss beside ``loss.weight``."""
    normalize: Literal["std", "none"] = "std"
    """The advantage of a rollout is its reward minus its group's mean, divided by the group's
    standard deviation (``std``) or not (``none``, arXiv:2503.20783)."""
    clip_low: float = Field(default=0.2, gt=0, lt=1)
    """The ratio q/mu is clipped from below at 1 - clip_low (PPO, arXiv:1707.06347)."""
    clip_high: float = Field(default=0.2, gt=0)
    """The ratio q/mu is clipped from above at 1 + clip_high."""
    mask_truncated: bool = False
    """Excludes responses that were cut off from the reward's loss, its denominators, and the means
    and standard deviations of their groups. A group with one response left has no advantage."""
    dual_clip: float | None = Field(default=3.0, gt=1)
    """Upper bound of the ratio q/mu for negative advantages (arXiv:1912.09729): it bounds the loss
    of a token that the student has come to prefer since it was sampled. Null removes the bound.
    Exactly on-policy the ratio is 1, below the bound."""


ScoreKind = Literal["sampled", "teacher_topk", "student_topk", "hidden"]


def score_kind(loss: Loss) -> ScoreKind:
    """The kind of scores that a teacher returns for this objective.

    ``sampled``: SampledLogprobs; ``teacher_topk``: TopK; ``student_topk``: CandidateLogprobs;
    ``hidden``: HiddenStates. With ``weight`` 0 it is ``sampled``, which only metrics use.
    """
    if not isinstance(loss, DivergenceConfig) or loss.weight == 0:
        return "sampled"
    return "hidden" if loss.support == "full_vocab" else loss.support


def scored_top_k(loss: Loss) -> int:
    """Number of tokens at each position that a teacher scores beside the sampled one."""
    top_k: int = getattr(loss, "top_k", 0)
    return top_k if score_kind(loss) in ("teacher_topk", "student_topk") else 0


def corrects(loss: Loss) -> bool:
    """Whether the distillation loss has importance weights."""
    if loss.importance == "auto":
        return not isinstance(loss, DivergenceConfig) and loss.weight > 0
    return loss.importance != "off"


def cuts(top_p: float, top_k: int, min_p: float) -> list[tuple[str, str, str]]:
    """Settings that exclude tokens from sampling: (key, value, value that excludes none)."""
    settings = [
        ("rollout.top_p", f"{top_p:g}", "1", top_p < 1),
        ("rollout.top_k", f"{top_k}", "0", top_k > 0),
        ("rollout.min_p", f"{min_p:g}", "0", min_p > 0),
    ]
    return [(key, value, neutral) for key, value, neutral, cuts in settings if cuts]


def nucleus_faults(
    loss: Loss, reward: RewardConfig | None, top_p: float, top_k: int = 0, min_p: float = 0.0
) -> list[tuple[str, str, str]]:
    """Losses with the ratio q/mu beside settings of ``cuts``: (key, fault, remedy).

    mu is normalized over the tokens that remained under the weights that sampled; q, under other
    weights, over other tokens: their ratio means nothing.
    """
    found = cuts(top_p, top_k, min_p)
    names = " and ".join(f"{key} {value}" for key, value, _ in found)
    makes = f"{names} {'makes' if len(found) == 1 else 'make'} incomparable"
    remedy = " and ".join(f"{key} {neutral}" for key, _, neutral in found)
    faults = []
    if found and corrects(loss):
        fault = f"weights tokens by q/mu, which {makes}"
        faults.append(("loss.importance", fault, f"off, or {remedy}"))
    if found and reward is not None:
        faults.append(("reward", f"its loss has the ratio q/mu, which {makes}", remedy))
    return faults


FAMILY = {"k1", "kl"}
DECORATION = {"reverse", "rkl", "token", "sampled", "estimator", "penalty", "loss", "supervised"}
DECORATION |= {"direct", "policy", "gradient", "pg"}
SUPERVISED = {"loss", "supervised", "direct"}
KIND_KEYS = ("kind", "name", "type", "estimator")
FLAGS = {"policy_gradient": True, "use_policy_gradient": True, "pg": True, "supervised": False}
POLICY_GRADIENT = "policy_gradient"

K1_MESSAGE = (
    "a supervised k1 does not distil: the gradient of E_q[log q - log p] taken through log q "
    "alone is that of log q, in which the teacher does not appear (its mean is zero)"
)
K1_REMEDY = "write loss: {kind: k1, gradient: policy_gradient}, or use reverse_kl, k2 or forward_kl"


def supervised_k1(loss: Any) -> str | None:
    """The key below ``loss`` that asks for a supervised k1; '' for ``loss`` itself; or None.

    k1 = log q(x) - log p(x) for a token x sampled from the student q. Differentiating it as a loss
    gives ∇ log q(x): the teacher p does not appear, and the mean of that over x ~ q is zero. Only
    as the advantage of a policy gradient, (log q(x) - log p(x)) ∇ log q(x), does it lead to the
    teacher. So it is found, and refused, under all of its names.
    """
    if isinstance(loss, str):
        return "" if _is_alias(loss) and loss != "k1" else None
    if not isinstance(loss, dict):
        return None
    key = next((key for key in KIND_KEYS if isinstance(loss.get(key), str)), None)
    if key is None or not _is_alias(loss[key]):
        return None
    refused = next((name for name in ("gradient", *FLAGS) if _asks(loss, name) is False), None)
    if refused is not None:
        return refused
    if _words(loss[key]) & SUPERVISED:
        return key
    if loss[key].lower() == "k1" or any(_asks(loss, name) for name in ("gradient", *FLAGS)):
        return None
    return key


def without_request(loss: Any) -> dict[str, Any]:
    """The same loss as a proper k1, so that its other keys can be checked too."""
    rest = loss if isinstance(loss, dict) else {}
    dropped = {*KIND_KEYS, *FLAGS, "gradient"}
    return {"kind": "k1", **{key: value for key, value in rest.items() if key not in dropped}}


def _asks(loss: dict[Any, Any], name: str) -> bool | None:
    """Whether this key asks for a policy gradient; None if it is missing or misspelled."""
    value = loss.get(name)
    if value is None:
        return None
    if name == "gradient":
        text = str(value)
        if difflib.get_close_matches(text, [POLICY_GRADIENT], cutoff=0.8):
            return True if text == POLICY_GRADIENT else None  # pydantic reports the misspelling
        return False
    off = value is False or str(value).lower() in ("0", "false", "no", "off", "none")
    return off is not FLAGS[name]


def _is_alias(kind: str) -> bool:
    words = _words(kind)
    return bool(words & FAMILY) and words <= FAMILY | DECORATION and words != {"reverse", "kl"}


def _words(kind: str) -> set[str]:
    return set(re.findall(r"[a-z0-9]+", kind.lower()))
