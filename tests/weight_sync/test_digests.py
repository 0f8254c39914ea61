"""Digests of tensors: what changes them, and what does not."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from async_opd.weight_sync import digests
from async_opd.weight_sync.digests import Digests


def digest(tensor: torch.Tensor) -> str:
    found = Digests(torch)
    found.add("w", tensor)
    return found.values()["w"]


DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.uint8)


@given(st.sampled_from(DTYPES), st.integers(1, 70), st.randoms(use_true_random=False))
def test_one_changed_bit_changes_the_digest(dtype: torch.dtype, size: int, draw: object) -> None:
    bits = torch.arange(size * dtype.itemsize, dtype=torch.uint8) * 7
    other = bits.clone()
    other[draw.randrange(len(bits))] ^= 1 << draw.randrange(8)
    assert digest(bits.view(dtype)) != digest(other.view(dtype))


@given(st.lists(st.integers(0, 2**31 - 1), min_size=2, max_size=40, unique=True), st.data())
def test_two_swapped_words_change_the_digest(words: list[int], data: st.DataObject) -> None:
    one, other = data.draw(
        st.lists(st.sampled_from(range(len(words))), min_size=2, max_size=2, unique=True)
    )
    swapped = list(words)
    swapped[one], swapped[other] = words[other], words[one]
    dtype = torch.int32
    assert digest(torch.tensor(words, dtype=dtype)) != digest(torch.tensor(swapped, dtype=dtype))


def test_the_digest_is_that_of_values_dtype_and_shape_wherever_they_lie() -> None:
    whole = torch.randn(4, 6)
    assert digest(whole[:, ::2]) == digest(whole[:, ::2].clone())
    odd = torch.arange(9, dtype=torch.uint8)[1:]
    assert digest(odd) == digest(odd.clone())
    zeros = torch.zeros(4, 4, dtype=torch.bfloat16)
    assert len({digest(zeros), digest(zeros.half()), digest(zeros.view(2, 8))}) == 3


@pytest.mark.parametrize("size", [1, 5, 16, 17])
def test_the_chunks_do_not_matter(size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    tensor = torch.randn(size * 3)
    whole = digest(tensor)
    monkeypatch.setattr(digests, "CHUNK_WORDS", {"cpu": 4})
    assert digest(tensor) == whole


def test_tensors_pass_through_unchanged_and_an_empty_one_has_a_digest() -> None:
    given = [("a", torch.ones(2)), ("b", torch.zeros(3))]
    found = Digests(torch)
    assert list(found.add_all(iter(given))) == given
    assert sorted(found.values()) == ["a", "b"]
    assert digest(torch.empty(0, 3)).startswith("float32[0, 3]:")


def test_a_small_tensor_takes_two_kernels() -> None:
    """A mixture of thousands of small tensors is bound by launches on a GPU."""
    tensors = [(str(i), torch.randn(8, i + 1)) for i in range(20)]

    class Count(TorchDispatchMode):
        kernels = 0

        def __torch_dispatch__(
            self, function: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            views = ("view", "slice", "split", "detach")
            Count.kernels += not any(view in str(function) for view in views)
            return function(*args, **(kwargs or {}))

    found = Digests(torch)
    found.add("the factors are made for the first one", torch.ones(1))
    with Count():
        for name, tensor in tensors:
            found.add(name, tensor)
    assert Count.kernels == 2 * len(tensors)
