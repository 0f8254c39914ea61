"""Which rank computes what: every rank the same number of micro-batches, in rounds.

    lengths ──longest first, to the emptiest──► groups ──by size, in rounds──► rank 0 … N-1

FSDP's collectives need all ranks in lock-step, and a round lasts as long as its largest
micro-batch: so those of one round are about equal.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence

from trainer.batches.packing import group_by_budget


def assign_micro_batches(lengths: Sequence[int], budget: int, ranks: int) -> list[list[list[int]]]:
    """Groups of indices for each rank. Deterministic.

    With one rank as ``group_by_budget``. With more each gets equally many groups, of at most
    ``budget`` tokens unless a single sample is longer; where there are fewer samples than ranks,
    some are empty.
    """
    if ranks == 1 or not lengths:
        return [group_by_budget(lengths, budget)] + [[] for _ in range(ranks - 1)]
    groups = _groups(lengths, budget, ranks)
    groups.sort(key=lambda group: -sum(lengths[index] for index in group))
    return [groups[rank::ranks] for rank in range(ranks)]


def _groups(lengths: Sequence[int], budget: int, ranks: int) -> list[list[int]]:
    """As few as fit, and a multiple of ``ranks``."""
    count = -(-len(group_by_budget(lengths, budget)) // ranks) * ranks
    while True:
        groups = _balanced_groups(lengths, count)
        if all(len(g) < 2 or sum(lengths[i] for i in g) <= budget for g in groups):
            return groups
        count += ranks


def _balanced_groups(lengths: Sequence[int], count: int) -> list[list[int]]:
    """Exactly so many groups: the longest first, each to the group with the fewest tokens."""
    groups: list[list[int]] = [[] for _ in range(count)]
    sizes = [(0, group) for group in range(count)]
    for index in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        size, group = sizes[0]
        groups[group].append(index)
        heapq.heapreplace(sizes, (size + lengths[index], group))
    return groups
