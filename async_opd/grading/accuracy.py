"""Figures of a model by several graded answers to each prompt: mean@n, pass@k, maj@n.

    grades of one prompt ──► its values ──mean and standard error over prompts──► metrics

All numbers are float64. A standard error is the sample standard deviation of the prompts' values
(denominator: prompts - 1) over the square root of their number: it says how far the mean may be
from that of all prompts like these, and is left out where there is one prompt only.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from fractions import Fraction
from functools import cache
from statistics import fmean, stdev

from async_opd.grading.graders import Grade


@cache
def pass_at_k(answers: int, correct: int, k: int) -> float:
    """The probability that at least one of ``k`` of the answers is correct; 0 to 1.

    The answers are drawn without replacement: ``1 - C(answers - correct, k) / C(answers, k)``, the
    unbiased estimator of Chen et al. 2021 (arXiv:2107.03374). ValueError unless
    ``0 <= correct <= answers`` and ``1 <= k <= answers``.
    """
    if not (0 <= correct <= answers and 1 <= k <= answers):
        raise ValueError(f"pass@{k} of {answers} answers, {correct} of them correct")
    wrong = Fraction(math.comb(answers - correct, k), math.comb(answers, k))
    return float(1 - wrong)


def majority(grades: Sequence[Grade]) -> float | None:
    """The score of the answer that most of a prompt's answers give; 0 to 1.

    Responses of which the grader extracted nothing do not vote. The votes for one answer score
    their mean; answers with equally many votes score the mean of theirs, as if one of them were
    drawn. None if there are no votes.
    """
    votes: dict[str, list[float]] = defaultdict(list)
    for grade in grades:
        if grade.answer is not None:
            votes[grade.answer].append(float(grade))
    most = max(map(len, votes.values()), default=0)
    return fmean(fmean(own) for own in votes.values() if len(own) == most) if votes else None


def drawn(n: int) -> list[int]:
    """The numbers of answers k of pass@k: the powers of two up to ``n``, and ``n``."""
    return sorted({n, *(1 << power for power in range(n.bit_length()))})


def metric_names(n: int) -> list[str]:
    """The names of all metrics that ``measures`` may have."""
    names = [f"mean@{n}", *(f"pass@{k}" for k in drawn(n)), f"maj@{n}"]
    return ["accuracy", *names, *(f"{name}_stderr" for name in names)]


def measures(
    prompts: Sequence[Sequence[Grade]], n: int, correct_at: float, votes: bool | None = None
) -> dict[str, float]:
    """Metrics of the graded answers to each prompt, of which at most ``n`` and at least one.

    ``mean@n``, and ``accuracy``, its other name: the mean over prompts of their mean score.
    ``pass@k``: over prompts with at least k graded answers; one is correct whose score is at least
    ``correct_at``. ``maj@n``, of several answers: see ``majority``; a prompt without votes
    counts 0. It is there if ``votes``: the grader reads answers from responses, by default if it
    has read one of these. ``…_stderr``: see the module.
    """
    found = {f"mean@{n}": [fmean(map(float, own)) for own in prompts]}
    for k in drawn(n):
        found[f"pass@{k}"] = list(_passed(prompts, k, correct_at))
    majorities = [majority(own) for own in prompts]
    if n > 1 and (any(one is not None for one in majorities) if votes is None else votes):
        found[f"maj@{n}"] = [one or 0.0 for one in majorities]
    metrics = {"accuracy": fmean(found[f"mean@{n}"])}
    for name, values in found.items():
        metrics |= _with_stderr(name, values)
    return metrics


def _passed(prompts: Sequence[Sequence[Grade]], k: int, correct_at: float) -> Iterator[float]:
    for own in prompts:
        if len(own) >= k:
            yield pass_at_k(len(own), sum(grade >= correct_at for grade in own), k)


def _with_stderr(name: str, values: Sequence[float]) -> Mapping[str, float]:
    if not values:
        return {}
    if len(values) == 1:
        return {name: values[0]}
    return {name: fmean(values), f"{name}_stderr": stdev(values) / math.sqrt(len(values))}
