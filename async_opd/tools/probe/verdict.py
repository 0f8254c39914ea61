"""The verdict on the figures of a pair: in words, a suggestion, and one score.

    template wrong?  ──► the teacher does not read the prompts that it was trained with
    headroom         ──► worse, equal, or better: does the student reach it?

The score predicts the gain in accuracy. A student that is trained on its own responses comes close
to what its teacher does after the prompts of the run, as far as it has the teacher's tokens: of a
better teacher the score is ``headroom · reach``. It forgets without any of them: of a worse one it
is the headroom itself.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from async_opd.tools.probe.figures import PairFigures

Kind = Literal["will_teach", "equal", "unclear", "worse", "wrong_template", "nothing_to_reach"]
SURE, SURE_OF_TEMPLATE = 2.0, 3.0
"""Standard errors of a difference that counts; of the template's more, because each pair is asked
and few templates are wrong."""
LEAST_ACCURACY, LEAST_NATS = 0.02, 0.1
"""Smaller differences of accuracies, and of nats a token, do not count however sure they are."""
STARTS, SELDOM_STARTS, FRONT = 0.5, 0.05, 1.0
"""A foreign start: the teacher's mass on one token, the student's, and by how many nats the gap of
the first position exceeds that of later ones."""
LEAST_REACH = 0.5
COVERED, BROADER = 0.95, 2.0
"""Reach at which reverse KL covers nearly all of the teacher's mass, and the ratio of forward to
reverse KL of a teacher that is broader than the student."""


@dataclass(frozen=True)
class Suggestion:
    """``weight`` is the teacher's, beside those of others; None where it does not teach."""

    objective: str
    top_k: int
    weight: float | None


@dataclass(frozen=True)
class Judgement:
    """``score`` predicts the gain in accuracy, -1 to 1; None without grades."""

    kind: Kind
    words: str
    score: float | None
    suggestion: Suggestion


def score_of(figures: PairFigures) -> float | None:
    """See the module; None without grades."""
    if figures.headroom is None:
        return None
    headroom = figures.headroom.mean
    return headroom * figures.reach if headroom > 0 else headroom


def verdicts(pairs: Sequence[PairFigures]) -> list[Judgement]:
    """The verdict of each pair; weights are relative to the other teachers that teach."""
    judged = [_judge(one) for one in pairs]
    good = [one for one, (kind, _) in zip(pairs, judged, strict=True) if _teaches(kind)]
    logs = [math.log(max(one.forward, 1e-6)) for one in good]
    middle = math.exp(sum(logs) / len(logs)) if logs else 1.0
    found = []
    for one, (kind, words) in zip(pairs, judged, strict=True):
        weight = round(min(max(middle / max(one.forward, 1e-6), 0.25), 4.0), 2)
        objective = "reverse_kl" if _suits_reverse(one) else "forward_kl"
        asked = Suggestion(objective, one.top_k, weight if _teaches(kind) else None)
        found.append(Judgement(kind, words, score_of(one), asked))
    return found


def _teaches(kind: Kind) -> bool:
    return kind in ("will_teach", "nothing_to_reach")


def _suits_reverse(one: PairFigures) -> bool:
    """Whether the student has the teacher's modes, and the teacher spreads more than it."""
    return one.reach >= COVERED and one.forward > BROADER * one.reverse


def _judge(one: PairFigures) -> tuple[Kind, str]:
    wrong = template_fault(one)
    if wrong:
        return "wrong_template", f"template looks wrong: {wrong}"
    if one.headroom is None:
        return _without_grades(one)
    headroom = f"{one.headroom.mean:+.1%} ± {one.headroom.stderr:.1%}"
    if one.headroom.exceeds(LEAST_ACCURACY, SURE):
        if one.reach < LEAST_REACH:
            words = f"nothing to reach: the teacher is better ({headroom}), but the student gives"
            return "nothing_to_reach", f"{words} only {one.reach:.0%} of its mass at least 0.1 %"
        return "will_teach", f"will teach: the teacher is better ({headroom})"
    if -one.headroom.mean > max(LEAST_ACCURACY, SURE * one.headroom.stderr):
        return "worse", f"worse: the student would forget what it can ({headroom})"
    if abs(one.headroom.mean) > LEAST_ACCURACY:
        return "unclear", f"unclear: the better model is not known ({headroom}), ask more prompts"
    return "equal", f"equal: nothing to gain in accuracy ({headroom})"


def _without_grades(one: PairFigures) -> tuple[Kind, str]:
    apart = f"{one.forward:.3g} nats a token apart; without a grader the better model is not known"
    if one.forward <= max(LEAST_NATS, one.floor.mean):
        return "equal", f"equal: the models are {apart}"
    if one.reach < LEAST_REACH:
        return "nothing_to_reach", f"nothing to reach: {one.reach:.0%} of the mass; {apart}"
    return "will_teach", f"will move the student: {apart}"


def template_fault(one: PairFigures) -> str:
    """Why the template looks wrong; empty if it does not."""
    own = one.template
    if own is not None:
        if own.accuracy is not None and own.accuracy.exceeds(LEAST_ACCURACY, SURE_OF_TEMPLATE):
            gained = f"{own.accuracy.mean:+.1%} ± {own.accuracy.stderr:.1%}"
            return f"with its own template the teacher answers better ({gained})"
        if own.logprob is not None and own.logprob.exceeds(LEAST_NATS, SURE_OF_TEMPLATE):
            nats = f"{own.logprob.mean:+.2f} ± {own.logprob.stderr:.2f} nats a token"
            return f"with its own template the teacher finds the student's answers likelier: {nats}"
    start = one.start
    foreign = start.teacher >= STARTS and start.student < SELDOM_STARTS
    if foreign and one.first_gap > one.later_gap + FRONT:
        return (
            f"the teacher begins {start.teacher:.0%} of its responses with token {start.token}, "
            f"the student {start.student:.1%}; first gap {one.first_gap:.2f}, "
            f"later {one.later_gap:.2f} nats"
        )
    return ""
