"""Assigns samples to ranks: every rank computes the same number of micro-batches.

    by tokens  samples ──largest first, to the smallest──► groups ──in turn──► rank 0 … N-1
    by costs   samples ──largest first, while they fit──► a group for each rank, round after round

FSDP's collectives keep all ranks in lock-step: the i-th micro-batches of all ranks, a round, are
computed at the same time, and last as long as the most expensive of them.
"""

from __future__ import annotations

import heapq
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from async_opd.core.samples import Header, Rollout, Sample
from async_opd.core.uid import Uid
from trainer.batches.packing import group_by_budget
from trainer.batches.token_weights import TokenWeight
from trainer.vision.images import Images, Samples, of_rollout

Groups = list[list[int]]

ROUND_TOKENS = 512
"""The cost of a round beside its samples, in tokens: gathering parameters of P bfloat16 numbers
twice at 400 GB/s takes as long as 4000 P FLOPs at 400 TFLOP/s, and a token takes 6 P."""


@dataclass(frozen=True)
class MicroBatch:
    """Samples that one rank computes together, and the weights of their tokens.

    With ``counts`` false it only keeps its rank in step with the others: its tokens weigh 0, and no
    metric contains them. With ``supervised`` true the loss is the responses' cross entropy, not the
    run's objective. ``images`` are encoded, by SHA-256.
    """

    samples: tuple[Sample, ...]
    token_weights: tuple[TokenWeight, ...]
    counts: bool = True
    supervised: bool = False
    images: Mapping[str, bytes] = field(default_factory=dict)

    @property
    def rollouts(self) -> list[Rollout]:
        """The samples' rollouts."""
        return [sample.rollout for sample in self.samples]

    @property
    def nbytes(self) -> int:
        """Bytes of the samples' arrays, and of their images."""
        return sum(sample.nbytes for sample in self.samples) + sum(map(len, self.images.values()))


Factors = Mapping[Uid, float] | None
"""By uid, what multiplies a sample's distillation weight; None and samples without: 1."""


def scaled(micro_batches: Sequence[MicroBatch], factors: Factors) -> Sequence[MicroBatch]:
    """The micro-batches with their token weights times the factors."""
    if not factors:
        return micro_batches
    weights = [
        tuple(
            replace(weight, weight=weight.weight * factors.get(sample.rollout.uid, 1.0))
            for sample, weight in zip(one.samples, one.token_weights, strict=True)
        )
        for one in micro_batches
    ]
    return [replace(o, token_weights=w) for o, w in zip(micro_batches, weights, strict=True)]


@dataclass(frozen=True)
class PlannedMicroBatch:
    """A micro-batch whose samples are named by their indices in the batch."""

    indices: tuple[int, ...]
    token_weights: tuple[TokenWeight, ...]
    counts: bool = True
    supervised: bool = False

    def of(self, samples: Samples, encoded: Images = None) -> MicroBatch:
        """The micro-batch with its samples, and those of the ``encoded`` images that they show."""
        chosen = tuple(samples[index] for index in self.indices)
        shown = [one.sha256 for sample in chosen for one in of_rollout(sample.rollout)]
        images = (
            {sha256: encoded[sha256] for sha256 in shown if sha256 in encoded} if encoded else {}
        )
        return MicroBatch(chosen, self.token_weights, self.counts, self.supervised, images)


def assign_micro_batches(
    lengths: Sequence[int], budget: int, ranks: int, costs: Sequence[float] | None = None
) -> list[Groups]:
    """Groups of indices for each rank. Deterministic.

    With one rank, the groups of ``group_by_budget``. With more, every rank gets equally many groups
    of at most ``budget`` tokens; a longer sample is a separate group. Some groups are empty if
    there are fewer samples than ranks. Of two divisions, by tokens and by ``costs``, which are in
    any unit and by default the tokens, the one with the lower ``step_cost``.
    """
    if ranks == 1 or not lengths:
        return [group_by_budget(lengths, budget)] + [[] for _ in range(ranks - 1)]
    costs = lengths if costs is None else costs
    found = (by_tokens(lengths, budget, ranks, costs), _by_costs(lengths, budget, ranks, costs))
    return min(found, key=lambda assigned: step_cost(assigned, lengths, costs))


def step_cost(assigned: Sequence[Groups], lengths: Sequence[int], costs: Sequence[float]) -> float:
    """The cost of a step: of each round the most expensive group, and ``ROUND_TOKENS``."""
    overhead = ROUND_TOKENS * sum(costs) / sum(lengths)
    together = zip(*assigned, strict=True)
    rounds = [[sum(costs[i] for i in group) for group in groups] for groups in together]
    return float(sum(overhead + max(spent) for spent in rounds))


def by_tokens(
    lengths: Sequence[int], budget: int, ranks: int, costs: Sequence[float]
) -> list[Groups]:
    """As few groups as the budget allows, a multiple of ``ranks``, with about equal tokens."""
    count = -(-len(group_by_budget(lengths, budget)) // ranks) * ranks
    while True:
        groups = _balanced_groups(lengths, count)
        if all(len(g) < 2 or sum(lengths[i] for i in g) <= budget for g in groups):
            break
        count += ranks
    groups.sort(key=lambda group: -sum(costs[index] for index in group))
    return [groups[rank::ranks] for rank in range(ranks)]


def _balanced_groups(lengths: Sequence[int], count: int) -> Groups:
    """``count`` groups: the longest sample first, each to the group with the fewest tokens."""
    groups: Groups = [[] for _ in range(count)]
    sizes = [(0, group) for group in range(count)]
    for index in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        size, group = sizes[0]
        groups[group].append(index)
        heapq.heapreplace(sizes, (size + lengths[index], group))
    return groups


def _by_costs(
    lengths: Sequence[int], budget: int, ranks: int, costs: Sequence[float]
) -> list[Groups]:
    """Rounds of groups with about equal costs, each as long as its most expensive sample.

    Or longer, where all that is left would otherwise take more rounds than its tokens do.
    """
    left = sorted(range(len(lengths)), key=lambda i: (-costs[i], i))
    rounds = []
    while left:
        least = -(-sum(lengths[i] for i in left) // (budget * ranks))
        bound = max(costs[left[0]], sum(costs[i] for i in left) / ranks / least)
        groups, left = _round(left, lengths, costs, ranks, (budget, bound))
        rounds.append(groups)
    return [[groups[rank] for groups in rounds] for rank in range(ranks)]


def _round(
    indices: Sequence[int],
    lengths: Sequence[int],
    costs: Sequence[float],
    ranks: int,
    bounds: tuple[int, float],
) -> tuple[Groups, list[int]]:
    """A group for each rank within the bounds of tokens and cost, and what did not fit in."""
    budget, bound = bounds
    groups: Groups = [[] for _ in range(ranks)]
    tokens, spent = [0] * ranks, [0.0] * ranks
    left = []
    for index in indices:
        for rank in sorted(range(ranks), key=spent.__getitem__):
            fits = tokens[rank] + lengths[index] <= budget and spent[rank] + costs[index] <= bound
            if fits or not groups[rank]:
                groups[rank].append(index)
                tokens[rank] += lengths[index]
                spent[rank] += costs[index]
                break
        else:
            left.append(index)
    return groups, left


def planned(
    headers: Sequence[Header],
    token_weights: Sequence[TokenWeight],
    group: Sequence[int],
    among: Sequence[int],
) -> PlannedMicroBatch:
    """The group's samples, by teacher.

    Of an empty group it is the shortest one with a response of those ``among`` which it was chosen,
    and weighs 0: a rank without anything to compute would miss the others' collectives.
    """
    if group:
        order = sorted(group, key=lambda index: headers[index].teacher)
        return PlannedMicroBatch(tuple(order), tuple(token_weights[i] for i in order))
    some = (i for i in among if headers[i].response_tokens)
    index = min(some, key=lambda i: headers[i].tokens)
    token_weight = replace(token_weights[index], weight=0.0, reward_weight=0.0)
    return PlannedMicroBatch((index,), (token_weight,), counts=False)
