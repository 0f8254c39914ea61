"""Assigns samples to ranks: every rank computes the same number of micro-batches.

    lengths ──longest first, to the smallest──► groups ──by size, in turn──► rank 0 … N-1

FSDP's collectives keep all ranks in lock-step: the i-th micro-batches of all ranks are computed at
the same time, and last as long as the largest of them. Sorted by size, they are about equal.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence

from trainer.batches.packing import group_by_budget


def assign_micro_batches(lengths: Sequence[int], budget: int, ranks: int) -> list[list[list[int]]]:
    """Groups of indices for each rank. Deterministic.

    With one rank, the groups of ``group_by_budget``. With more, every rank gets equally many groups
    of at most ``budget`` tokens; a longer sample is a group of its own. Some groups are empty if
    there are fewer samples than ranks.
    """
    if ranks == 1 or not lengths:
        return [group_by_budget(lengths, budget)] + [[] for _ in range(ranks - 1)]
    groups = _groups(lengths, budget, ranks)
    groups.sort(key=lambda group: -sum(lengths[index] for index in group))
    return [groups[rank::ranks] for rank in range(ranks)]


def _groups(lengths: Sequence[int], budget: int, ranks: int) -> list[list[int]]:
    """As few groups as the budget allows, a multiple of ``ranks``."""
    count = -(-len(group_by_budget(lengths, budget)) // ranks) * ranks
    while True:
        groups = _balanced_groups(lengths, count)
        if all(len(g) < 2 or sum(lengths[i] for i in g) <= budget for g in groups):
            return groups
        count += ranks


def _balanced_groups(lengths: Sequence[int], count: int) -> list[list[int]]:
    """``count`` groups: the longest sample first, each to the group with the fewest tokens."""
    groups: list[list[int]] = [[] for _ in range(count)]
    sizes = [(0, group) for group in range(count)]
    for index in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        size, group = sizes[0]
        groups[group].append(index)
        heapq.heapreplace(sizes, (size + lengths[index], group))
    return groups
