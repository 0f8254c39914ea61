"""Attention across ranks is that of one rank: outputs and gradients, of four gloo processes."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import Any

import pytest
import torch

from tests.trainer.attention import reference
from tests.trainer.processes import spread
from trainer.context import attend_across
from trainer.student.attention import Ragged, by_sequence

RANKS = 4
LENGTHS = {
    "one sequence": [24],
    "short ones": [1, 2, 1, 3, 1, 1, 2, 5, 1, 7],
    "two": [5, 19],
    "at borders": [6, 6, 6, 6],
}


@dataclass(frozen=True)
class Case:
    """Heads of queries, and of keys and values."""

    heads: int
    kv_heads: int
    window: int | None = None
    soft_cap: float | None = None


CASES = {
    "as many": Case(8, 8),
    "grouped": Case(8, 4),
    "fewer than ranks": Case(8, 2),
    "one": Case(4, 1),
    "three in six": Case(12, 6),
    "not divided": Case(6, 3),
    "fewer queries than ranks": Case(3, 1),
    "window": Case(4, 2, window=3),
    "window, not divided": Case(6, 2, window=3),
    "soft cap": Case(4, 2, soft_cap=1.5),
    "soft cap, not divided": Case(6, 2, soft_cap=1.5),
}
EVERY = list(itertools.product(CASES, LENGTHS))


def inputs(case: Case, lengths: list[int]) -> tuple[list[torch.Tensor], Ragged]:
    torch.manual_seed(1)
    total = sum(lengths)
    heads = (case.heads, case.kv_heads, case.kv_heads)
    tensors = [torch.randn(total, count, 8, dtype=torch.double) for count in heads]
    starts = torch.tensor([0, *itertools.accumulate(lengths)], dtype=torch.int32)
    return tensors, Ragged(starts, max(lengths), 0.4, case.window, case.soft_cap)


def attended(kernel: Any, tensors: list[torch.Tensor], ragged: Ragged) -> list[torch.Tensor]:
    """The output, and the gradients of a function of it."""
    leaves = [tensor.clone().requires_grad_() for tensor in tensors]
    out = kernel(*leaves, ragged)
    (out * torch.linspace(1, 2, out[0].numel()).view(out[0].shape)).square().sum().backward()
    return [out.detach(), *(leaf.grad for leaf in leaves if leaf.grad is not None)]


def on_ranks(rank: int) -> Any:
    """Each case on two ranks of the four, and on all; this rank's shares."""
    import torch.distributed as dist

    pairs = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    found = {}
    for (name, lengths), (size, group) in itertools.product(
        EVERY, [(2, pairs[rank // 2]), (4, dist.group.WORLD)]
    ):
        tensors, ragged = inputs(CASES[name], LENGTHS[lengths])
        share = len(tensors[0]) // size
        own = [t[rank % size * share :][:share] for t in tensors]

        def kernel(*given: Any, group: Any = group) -> torch.Tensor:
            return attend_across(by_sequence, group, *given)

        found[name, lengths, size] = attended(kernel, own, ragged)
    return found


@pytest.fixture(scope="module")
def shares(tmp_path_factory: pytest.TempPathFactory) -> list[Any]:
    return spread(RANKS, on_ranks, tmp_path_factory.mktemp("exchange"))


@pytest.mark.slow
@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize(("name", "lengths"), EVERY)
def test_all_is_as_on_one_rank(shares: list[Any], name: str, lengths: str, size: int) -> None:
    expected = attended(by_sequence, *inputs(CASES[name], LENGTHS[lengths]))
    of_ranks = [share[name, lengths, size] for share in shares[:size]]
    seen = [torch.cat(parts) for parts in zip(*of_ranks, strict=True)]
    for one, other in zip(seen, expected, strict=True):
        assert torch.allclose(one, other, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize(("name", "lengths"), EVERY)
def test_sequences_apart_are_attention_by_its_definition(name: str, lengths: str) -> None:
    (query, key, value), ragged = inputs(CASES[name], LENGTHS[lengths])
    expected = reference(query, key, value, ragged)
    assert torch.allclose(by_sequence(query, key, value, ragged), expected, atol=1e-5)
