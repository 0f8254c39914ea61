"""Tests of checks say how many GPUs there are, and PyTorch counts as one that can use them."""

from __future__ import annotations

import pytest


@pytest.fixture(autouse=True)
def pretended(torch_for_gpus: None) -> None:
    """A test of a PyTorch for CPUs names its version itself."""
