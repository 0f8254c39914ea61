"""The ``loss`` and ``reward`` sections: which objective, over which support, how it is reduced.

The objectives themselves are in ``trainer/losses``; docs/objectives.md says which to choose.
"""

from __future__ import annotations

from typing import Literal, Self, TypeVar

from pydantic import Field, PositiveInt, model_validator

from async_opd.config.section import Section

Reduction = Literal[
    "token_mean", "seq_mean_token_mean", "seq_mean_token_sum", "seq_mean_token_sum_norm"
]
Support = Literal["teacher_topk", "student_topk", "full_vocab"]


class ObjectiveConfig(Section):
    """What every objective has."""

    weight: float = Field(default=1.0, ge=0)
    """Factor of the distillation loss; 0 trains on the reward alone."""
    reduction: Reduction = "token_mean"
    """From tokens to one number: ``token_mean`` (sum over tokens / response tokens of the batch),
    ``seq_mean_token_mean`` (mean over samples of each one's token mean), ``seq_mean_token_sum``
    (mean over samples of each one's sum), ``seq_mean_token_sum_norm`` (that, divided by
    ``rollout.max_tokens``)."""
    importance: Literal["auto", "off", "truncated", "sequence"] = "auto"
    """``truncated`` weights each token by min(q/mu, ``importance_cap``), q the student now and mu
    the one that sampled it; ``sequence`` all tokens of a response alike, by the product of q/mu
    over the response, capped in the same way: prefixes are then corrected too, with far more
    variance. ``auto``: truncated for sampled-token objectives, which are wrong off-policy
    without it; off for divergences, which are exact at each position whoever sampled it. q has
    the temperature of the rollouts, so that the weight is 1 where nothing is stale; ``top_p``,
    ``top_k`` and ``min_p`` of the rollouts are refused."""
    importance_cap: float = Field(default=2.0, ge=1)
    """Truncation of the importance weights."""
    mask_truncated: bool = False
    """Leaves responses that were cut off (``finish_reason: length``) out of the distillation loss:
    they have no gradient, and are in no denominator of ``reduction`` either."""
    teacher_floor: float | None = Field(default=None, lt=0)
    """Log-probabilities of the teacher below it (nats, as -10) count as it, those of the rest of a
    support too: what a teacher excludes is then finitely bad. Only where the loss has the
    teacher's logarithm without its probability: ``reverse_kl``, ``jsd`` with beta 1, sampled
    tokens. The student's side is never bounded."""


class DivergenceConfig(ObjectiveConfig):
    """A divergence between the teacher's and the student's distribution at each position."""

    support: Support = "teacher_topk"
    """Outcomes it sums over: the teacher's ``top_k`` best tokens, the student's (chosen when it
    sampled), or the whole vocabulary (exact, by the teacher's hidden states)."""
    top_k: PositiveInt = 64
    """Tokens of a top-k support at each position."""
    tail: Literal["bucket", "ignore", "renormalize"] = "bucket"
    """The mass outside of a top-k support: one more outcome (``bucket``: a true divergence of
    coarser distributions), left out (``ignore``: can be negative), or scaled away
    (``renormalize``)."""
    clamp: float | None = Field(default=None, gt=0)
    """Tokens with a larger divergence are scaled down to it, gradient and all: their pull is
    bounded, never removed. The share it touches is a metric."""


Bounded = TypeVar("Bounded", bound=ObjectiveConfig)


def _without_floor(loss: Bounded, name: str) -> Bounded:
    if loss.teacher_floor is not None:
        raise ValueError(
            f"{name} needs no teacher_floor: what the teacher excludes adds nothing to it; leave "
            "teacher_floor out"
        )
    return loss


class ForwardKLConfig(DivergenceConfig):
    """Forward KL(teacher ‖ student): mass covering, tolerates stale samples."""

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


class K1Config(ObjectiveConfig):
    """Reverse KL by the sampled-token estimator k1 = log q - log p, as a policy gradient."""

    kind: Literal["k1"]
    gradient: Literal["policy_gradient"] = "policy_gradient"
    """The estimator is an advantage. A *supervised* k1 is refused: its gradient is that of log q
    alone, in which the teacher does not appear."""
    clamp: float | None = Field(default=None, gt=0)
    """Bounds each token's advantage to [-clamp, clamp]; the share it touches is a metric."""


class SampledConfig(ObjectiveConfig):
    """Another estimate from the sampled token: k2, k3 or abs (see trainer/losses/estimators.py)."""

    kind: Literal["k2", "k3", "abs"]
    gradient: Literal["supervised", "policy_gradient"] = "supervised"
    """Differentiate the estimate, or use its negative as the sampled token's advantage."""
    clamp: float | None = Field(default=None, gt=0)
    """Bounds each token's advantage to [-clamp, clamp]; the share it touches is a metric."""

    @model_validator(mode="after")
    def _clamp_is_for_advantages(self) -> Self:
        if self.clamp is not None and self.gradient == "supervised":
            raise ValueError(
                "clamp bounds an advantage; a supervised estimate has none, and clamping the "
                "estimate itself would silently remove the gradient of the tokens it touches"
            )
        return self


Loss = ForwardKLConfig | ReverseKLConfig | JSDConfig | K1Config | SampledConfig


class RewardConfig(Section):
    """A task reward for each rollout, with group-relative advantages (GRPO, arXiv:2402.03300)."""

    grader: str = "exact"
    """As ``eval.grader``: a number from 0 to 1 for each finished response."""
    weight: float = Field(default=1.0, gt=0)
    """Factor of the reward's loss beside ``loss.weight``."""
    normalize: Literal["std", "none"] = "std"
    """Advantage of a rollout: reward minus its group's mean, divided by the group's standard
    deviation (``std``) or not (``none``, arXiv:2503.20783)."""
    clip_low: float = Field(default=0.2, gt=0, lt=1)
    """The ratio q/mu counts down to 1 - clip_low …"""
    clip_high: float = Field(default=0.2, gt=0)
    """… and up to 1 + clip_high (PPO, arXiv:1707.06347)."""
    mask_truncated: bool = False
    """Leaves responses that were cut off out of the reward's loss, its denominators, and the means
    and standard deviations of their groups. A group of which one is left has no advantage."""
    dual_clip: float | None = Field(default=3.0, gt=1)
    """Where the advantage is negative, the ratio q/mu counts up to this (arXiv:1912.09729): the
    loss of a token that the student has come to prefer since it was sampled is bounded. Null takes
    the bound away. Exactly on-policy the ratio is 1, and nothing reaches it."""


ScoreKind = Literal["sampled", "teacher_topk", "student_topk", "hidden"]


def score_kind(loss: Loss) -> ScoreKind:
    """What a teacher has to return for this objective.

    ``sampled``: SampledLogprobs; ``teacher_topk``: TopK; ``student_topk``: CandidateLogprobs;
    ``hidden``: HiddenStates. With ``weight`` 0 the sampled token is enough: it is only watched.
    """
    if not isinstance(loss, DivergenceConfig) or loss.weight == 0:
        return "sampled"
    return "hidden" if loss.support == "full_vocab" else loss.support


def scored_top_k(loss: Loss) -> int:
    """Tokens at each position for which a teacher returns log-probabilities, beside the sampled."""
    top_k: int = getattr(loss, "top_k", 0)
    return top_k if score_kind(loss) in ("teacher_topk", "student_topk") else 0


def corrects(loss: Loss) -> bool:
    """Whether tokens get importance weights."""
    if loss.importance == "auto":
        return not isinstance(loss, DivergenceConfig) and loss.weight > 0
    return loss.importance != "off"


def cuts(top_p: float, top_k: int, min_p: float) -> list[tuple[str, str, str]]:
    """What leaves tokens out of the sampled distribution: (key, value, value that does not)."""
    every = [
        ("rollout.top_p", f"{top_p:g}", "1", top_p < 1),
        ("rollout.top_k", f"{top_k}", "0", top_k > 0),
        ("rollout.min_p", f"{min_p:g}", "0", min_p > 0),
    ]
    return [(key, value, whole) for key, value, whole, cut in every if cut]


def nucleus_faults(
    loss: Loss, reward: RewardConfig | None, top_p: float, top_k: int = 0, min_p: float = 0.0
) -> list[tuple[str, str, str]]:
    """What needs the ratio q/mu, which is not known of a nucleus: (key, fault, remedy).

    mu is normalized over the tokens that were left by the weights that sampled (``cuts``); no q of
    today has the same ones.
    """
    found = cuts(top_p, top_k, min_p)
    if not found:
        return []
    names = " and ".join(f"{key} {value}" for key, value, _ in found)
    makes = f"{names} {'makes' if len(found) == 1 else 'make'} incomparable"
    remedy = " and ".join(f"{key} {whole}" for key, _, whole in found)
    faults = []
    if corrects(loss):
        faults.append(
            ("loss.importance", f"weights tokens by q/mu, which {makes}", f"off, or {remedy}")
        )
    if reward is not None:
        faults.append(("reward", f"its loss has the ratio q/mu, which {makes}", remedy))
    return faults
