"""The metrics of a step from sums over its tokens, which each rank transfers at once.

    values of tokens ──token_sums──► sums ──merged──► of a rank ──step_metrics──► of all ranks

``total`` is summed (its values are summands of the loss); all other values are averaged over
response tokens, under ``loss/``. ``entropy`` is the student's, in nats, over its whole vocabulary.
The importance ratio r = q/mu of each token, whether the loss uses it or not, becomes

    importance/mean, importance/max    of r as it is
    importance/ess                     (Σ r)² / (N Σ r²): 1 where all ratios are the same

the importance weights, where the loss has them (r of each token, or with ``importance: sequence``
the product of r over its response), become

    importance/truncated               share of tokens whose weight is above the cap
    importance/weight                  mean over tokens of the weights, truncated at the cap

and log p - log mu of the sampled tokens becomes, for hidden states,

    teacher/<name>/agreement           its mean over this teacher's tokens, in nats

For all other scores the scoring stage computes the agreement (``teachers/meter.py``).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence

import torch

from trainer.losses.terms import Metrics as Metrics

LARGEST, SQUARES = "importance largest", "importance squared"
"""Names of the largest importance ratio and of the sum of their squares."""
GAP, GAP_TOKENS = "agreement/", "agreement tokens/"
"""Before a teacher's name: the sum of its tokens' gaps, and their number."""


def concat_metrics(reports: Sequence[Metrics]) -> Metrics:
    """The values of several parts of a batch, concatenated; parts without values are left out."""
    filled = [report for report in reports if report]
    if len(filled) <= 1:
        return dict(*filled)
    return {name: torch.cat([one[name] for one in filled]) for name in filled[0]}


def token_sums(values: Metrics, teachers: Sequence[tuple[str, int]] = ()) -> Metrics:
    """Sums in float64 of a part's values, by name; ``tokens`` is their number.

    Of the importance ratios also the ``LARGEST`` and the squares' sum. ``teachers`` are (name,
    number of tokens) of consecutive values, and needed only for agreement.
    """
    found = {name: value.double() for name, value in values.items()}
    ratio, gap = found["importance"], found.pop("agreement", None)
    sums = {name: value.sum() for name, value in found.items()}
    sums |= {"tokens": ratio.new_full((), len(ratio)), SQUARES: ratio.square().sum()}
    if len(ratio):
        sums[LARGEST] = ratio.max()
    for name, part in _of_teachers(gap, teachers):
        count = part.new_full((), len(part))
        for key, value in ((GAP + name, part.sum()), (GAP_TOKENS + name, count)):
            sums[key] = sums[key] + value if key in sums else value
    return sums


def merged(parts: Sequence[Metrics]) -> dict[str, float]:
    """The sums of all parts, with one transfer from the device; none of no parts."""
    every = [(name, value) for part in parts for name, value in part.items()]
    if not every:
        return {}
    values = torch.stack([value for _, value in every]).tolist()
    return _added(zip([name for name, _ in every], values, strict=True))


def _added(sums: Iterable[tuple[str, float]]) -> dict[str, float]:
    """The values of each name added up, and the largest of ``LARGEST``: NaN if one is."""
    total: dict[str, float] = {}
    for name, value in sums:
        before = total.get(name)
        if before is None:
            total[name] = value
        elif name == LARGEST:
            total[name] = value if math.isnan(value) else max(before, value)
        else:
            total[name] = before + value
    return total


def step_metrics(parts: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Metrics by name from the sums of all ranks; of no tokens, only a ``loss/total`` of 0."""
    found = _added(item for part in parts for item in part.items())
    tokens = found.pop("tokens", 0.0)
    if not tokens:
        return {"loss/total": 0.0}
    ratio, squares, largest = (found.pop(name) for name in ("importance", SQUARES, LARGEST))
    gaps = {name: found.pop(name) for name in list(found) if name.startswith((GAP, GAP_TOKENS))}
    scalars = {"loss/total": found.pop("total")}
    for name, key in (("truncated", "truncated"), ("importance_weight", "weight")):
        if name in found:
            scalars[f"importance/{key}"] = found.pop(name) / tokens
    scalars |= {f"loss/{name}": value / tokens for name, value in found.items()}
    scalars |= {"importance/mean": ratio / tokens, "importance/max": largest}
    scalars["importance/ess"] = ratio * ratio / (tokens * squares) if squares else math.nan
    return scalars | _agreement(gaps)


def not_finite(means: Mapping[str, float], norm: float) -> str:
    """Which values of a step are not finite, with the values; empty if none is."""
    loss = means["loss/total"]
    broken = [key for key, value in means.items() if math.isnan(value)]
    if math.isfinite(loss) and math.isfinite(norm) and not broken:
        return ""
    seen = f"loss {loss}, gradient norm {norm}"
    return seen + (f", not a number: {', '.join(broken)}" if broken else "")


def _of_teachers(
    gap: torch.Tensor | None, teachers: Sequence[tuple[str, int]]
) -> Iterator[tuple[str, torch.Tensor]]:
    """The gaps of each run of one teacher's tokens."""
    if gap is not None and teachers:
        parts = torch.split(gap, [count for _, count in teachers])
        yield from zip([name for name, _ in teachers], parts, strict=True)


def _agreement(gaps: Mapping[str, float]) -> dict[str, float]:
    """The mean gap of each teacher that has tokens."""
    names = [key.removeprefix(GAP) for key in gaps if key.startswith(GAP)]
    return {
        f"teacher/{name}/agreement": gaps[GAP + name] / count
        for name in names
        if (count := gaps[GAP_TOKENS + name])
    }
