"""The metrics of a step from the values of its tokens, with one transfer from the device.

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
from collections import defaultdict
from collections.abc import Mapping, Sequence

import torch

from trainer.losses.terms import Metrics as Metrics


def concat_metrics(reports: Sequence[Metrics]) -> Metrics:
    """The values of several parts of a batch, concatenated; parts without values are left out."""
    filled = [report for report in reports if report]
    if len(filled) <= 1:
        return dict(*filled)
    return {name: torch.cat([one[name] for one in filled]) for name in filled[0]}


def step_metrics(values: Metrics, runs: Sequence[tuple[str, int]] = ()) -> dict[str, float]:
    """Metrics by name; of no values, only a ``loss/total`` of 0.

    ``runs`` are (teacher, number of tokens) of consecutive values, and needed only for agreement.
    """
    if not values:
        return {"loss/total": 0.0}
    found = {name: value.double() for name, value in values.items()}
    ratio, gap = found.pop("importance"), found.pop("agreement", None)
    weights = {"truncated": found.pop("truncated", None)}
    weights["weight"] = found.pop("importance_weight", None)
    scalars = {f"loss/{name}": value.mean() for name, value in found.items()}
    scalars["loss/total"] = found["total"].sum()
    scalars["importance/mean"] = ratio.mean()
    scalars["importance/max"] = ratio.max()
    scalars |= {f"importance/{k}": v.mean() for k, v in weights.items() if v is not None}
    scalars["importance/ess"] = ratio.sum().square() / (len(ratio) * ratio.square().sum())
    if gap is not None:
        scalars |= _agreement(gap, runs)
    return dict(zip(scalars, torch.stack(list(scalars.values())).tolist(), strict=True))


def not_finite(means: Mapping[str, float], norm: float) -> str:
    """Which values of a step are not finite, with the values; empty if none is."""
    loss = means["loss/total"]
    broken = [key for key, value in means.items() if math.isnan(value)]
    if math.isfinite(loss) and math.isfinite(norm) and not broken:
        return ""
    seen = f"loss {loss}, gradient norm {norm}"
    return seen + (f", not a number: {', '.join(broken)}" if broken else "")


def _agreement(gap: torch.Tensor, runs: Sequence[tuple[str, int]]) -> Metrics:
    """The mean gap of each teacher that has tokens."""
    parts: defaultdict[str, list[torch.Tensor]] = defaultdict(list)
    for (teacher, _), part in zip(
        runs, torch.split(gap, [count for _, count in runs]), strict=True
    ):
        parts[teacher].append(part)
    whole = {teacher: torch.cat(found) for teacher, found in parts.items()}
    return {f"teacher/{name}/agreement": part.mean() for name, part in whole.items() if len(part)}
