"""PyTorch counts as one for GPUs, whatever is installed: tests say how many GPUs there are."""

from __future__ import annotations

import pytest

from async_opd.checks import resources


@pytest.fixture(autouse=True)
def torch_for_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tests of a PyTorch for CPUs name its version themselves."""
    monkeypatch.setattr(resources, "installed", lambda name: "2.13.0+cu130")
