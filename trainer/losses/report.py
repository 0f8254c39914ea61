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

For all other scores the scoring stage computes the agreement (``teachers/meter.py``). Of norms of
tokens' gradients only the share of each teacher is a metric:

    teacher/<name>/gradient_share      Σ ‖∂loss/∂h_t‖ over its tokens, by that over all tokens

where h_t are the student's output states, from which the head computes the logits of token t.

Masked tokens (``async.on_stale: mask``) are in no mean, as the distillation loss does not train
them, and those of the reward (``OF_REWARD``) are over all tokens where there is one.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence

import torch

from trainer.losses.objective import LOG_RATIO, MASKED
from trainer.losses.recorded import STUDENT, TEACHER, TOP
from trainer.losses.terms import Metrics as Metrics

GRADIENT = "gradient"
"""Norm of each token's part of the loss's gradient by the student's output states [H]."""
LARGEST, SQUARES = "importance largest", "importance squared"
"""Names of the largest importance ratio and of the sum of their squares."""
OF, OF_SOURCE, OF_TURN = "of teachers: ", "of sources: ", "of turns: "
MEASURED = "measured "
"""Before the names of sums over the tokens of a teacher, a data source or a turn of episodes, and
of the number of tokens in a sparse sum."""
OF_TEACHERS = {
    "distillation": "loss",
    "k1": "gap",
    "entropy": "student_entropy",
    "teacher_entropy": "teacher_entropy",
    "student_topk_mass": "student_topk_mass",
    "teacher_topk_mass": "teacher_topk_mass",
    "topk_overlap": "topk_overlap",
    "agreement": "agreement",
}
"""Values of tokens whose mean over the tokens of each teacher is a metric, and its name."""
OF_SOURCES = {"distillation": "loss"}
OF_TURNS = {"distillation": "loss", "k1": "gap"}
"""The same of each data source, and of each turn of episodes."""
OF_REWARD = ("surrogate", "clipped", "dual_clipped", "importance", "rollout_gap")
"""Values of tokens whose mean is over all of them where a reward trains these."""
REWARDED = "tokens of the reward"
"""Name of the number of tokens of these means, where it is another than that of all others."""
UNLOGGED = frozenset({STUDENT, TEACHER, LOG_RATIO, MASKED, *TOP})
"""Values of tokens that are for records and ``losses.mismatch`` only."""
OF_IMPORTANCE = {"truncated": "importance/truncated", "importance_weight": "importance/weight"}
"""Means of values of tokens that are not under ``loss/``."""
SPARSE = "topk_overlap"
"""The value that some tokens have only, and that is NaN for all others."""


def concat_metrics(reports: Sequence[Metrics]) -> Metrics:
    """The values of several parts of a batch, concatenated; parts without values are left out."""
    filled = [report for report in reports if report]
    if len(filled) <= 1:
        return dict(*filled)
    return {name: torch.cat([one[name] for one in filled]) for name in filled[0]}


def token_sums(
    values: Metrics, owners: torch.Tensor | None = None, names: Sequence[tuple[str, str, str]] = ()
) -> Metrics:
    """Sums in float64 of a part's values, by name; ``tokens`` is their number.

    Of the importance ratios also the ``LARGEST`` and the squares' sum. ``owners`` [N] are each
    value's index in ``names``: teacher, data source and turn ('' without episodes), which have
    separate metrics.
    """
    found = {name: value.double() for name, value in values.items() if name not in UNLOGGED}
    counts = torch.ones_like(found["importance"])
    number, masked = {"tokens": counts.sum()}, values.get(MASKED)
    if masked is not None:
        whole = OF_REWARD if "surrogate" in values else ()
        number |= {REWARDED: number["tokens"]} if whole else {}
        for name in found.keys() - {"total", GRADIENT, *whole}:
            found[name] = found[name].masked_fill(masked, math.nan if name == SPARSE else 0.0)
        counts = counts.masked_fill(masked, 0.0)
        number["tokens"] = counts.sum()
    ratio = found["importance"]
    sums = {} if owners is None else _of_owners(found | {"tokens": counts}, owners, names)
    for name in ("agreement", GRADIENT):
        found.pop(name, None)
    parts = [part for name in found for part in _measured(name, found[name])]
    sums |= {name: value.sum() for name, value in parts}
    sums |= {**number, SQUARES: ratio.square().sum()}
    if len(ratio):
        sums[LARGEST] = ratio.max()
    return sums


def _measured(name: str, values: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
    """The values; a sparse one is 0 where it is not measured, and 1s where it is come with it."""
    yield name, values.nan_to_num(0.0) if name == SPARSE else values
    if name == SPARSE:
        yield MEASURED + name, (~values.isnan()).double()


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
    rewarded = found.pop(REWARDED, tokens)
    if not rewarded:
        return {"loss/total": 0.0}
    ratio, squares, largest = (found.pop(name) for name in ("importance", SQUARES, LARGEST))
    teachers, sources, turns = (
        {name.removeprefix(of): found.pop(name) for name in list(found) if name.startswith(of)}
        for of in (OF, OF_SOURCE, OF_TURN)
    )
    scalars = {"loss/total": found.pop("total")}
    scalars |= _by_owner("teacher", OF_TEACHERS, teachers)
    scalars |= _by_owner("source", OF_SOURCES, sources)
    scalars |= _by_owner("turn", OF_TURNS, turns)
    measured, overlap = found.pop(MEASURED + SPARSE, 0.0), found.pop(SPARSE, 0.0)
    if measured:
        scalars[f"loss/{SPARSE}"] = overlap / measured
    for name, value in found.items():
        key = OF_IMPORTANCE.get(name, f"loss/{name}")
        if number := rewarded if name in OF_REWARD else tokens:
            scalars[key] = value / number
    scalars |= {"importance/mean": ratio / rewarded, "importance/max": largest}
    scalars["importance/ess"] = ratio * ratio / (rewarded * squares) if squares else math.nan
    return scalars


def not_finite(means: Mapping[str, float], norm: float) -> str:
    """Which values of a step are not finite, with the values; empty if none is."""
    loss = means["loss/total"]
    broken = [key for key, value in means.items() if math.isnan(value)]
    if math.isfinite(loss) and math.isfinite(norm) and not broken:
        return ""
    seen = f"loss {loss}, gradient norm {norm}"
    return seen + (f", not a number: {', '.join(broken)}" if broken else "")


def _of_owners(
    found: Metrics, owners: torch.Tensor, names: Sequence[tuple[str, str, str]]
) -> Metrics:
    """Sums over the tokens of each teacher, source and turn: ``OF``, the value's name, theirs."""
    own = [name for name in (*OF_TEACHERS, GRADIENT) if name in found]
    parts = [part for name in own for part in _measured(name, found[name])]
    every = {"tokens": found["tokens"], **dict(parts)}
    values = torch.stack(list(every.values()))
    sums: Metrics = {}
    for index, (teacher, source, turn) in enumerate(names):
        # Not index_add: CUDA adds with atomics there, in another order each time.
        sums_of_owner = torch.where(owners == index, values, 0.0).sum(1)
        for name, value in zip(every, sums_of_owner.unbind(), strict=True):
            keys = [f"{OF}{name}/{teacher}"]
            if name == "tokens" or name in OF_SOURCES:
                keys.append(f"{OF_SOURCE}{name}/{source}")
            if turn and (name == "tokens" or name in OF_TURNS):
                keys.append(f"{OF_TURN}{name}/{turn}")
            for key in keys:
                sums[key] = sums[key] + value if key in sums else value
    return sums


def _by_owner(kind: str, names: Mapping[str, str], sums: Mapping[str, float]) -> dict[str, float]:
    """``<kind>/<name>/…`` of each teacher, or data source, that has tokens."""
    counts = {k.removeprefix("tokens/"): n for k, n in sums.items() if k.startswith("tokens/")}
    metrics: dict[str, float] = {}
    norms = sum(sums.get(f"{GRADIENT}/{owner}", 0.0) for owner in counts)
    for owner, tokens in counts.items():
        if tokens and norms and (norm := sums.get(f"{GRADIENT}/{owner}")) is not None:
            metrics[f"{kind}/{owner}/gradient_share"] = norm / norms
        for name, key in names.items() if tokens else ():
            number = sums.get(f"{MEASURED}{name}/{owner}", tokens)
            if number and (value := sums.get(f"{name}/{owner}")) is not None:
                metrics[f"{kind}/{owner}/{key}"] = value / number
        if tokens:
            metrics[f"{kind}/{owner}/token_share"] = tokens / sum(counts.values())
    return metrics
