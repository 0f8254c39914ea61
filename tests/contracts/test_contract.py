"""The error of a contract that a library breaks."""

from __future__ import annotations

import pytest
import torch

from tests.contracts import contract


def test_a_broken_contract_names_the_function_the_version_and_what_is_needed() -> None:
    with (
        pytest.raises(AssertionError) as raised,
        contract("torch.cuda.Stream.wait", "waits for an event"),
    ):
        raise TypeError("wait() takes no arguments")
    words = str(raised.value)
    assert words.startswith(f"torch.cuda.Stream.wait of torch {torch.__version__} has changed: ")
    assert "async_opd needs that it waits for an event. Found: TypeError: wait() takes" in words
