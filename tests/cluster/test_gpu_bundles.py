"""Processes whose place is lost while they start: those beyond what a pool needs do not start."""

from __future__ import annotations

import asyncio
from collections.abc import Collection
from dataclasses import dataclass, field

import pytest

from async_opd.checks.gpu_plan import Bundle, Unit
from async_opd.cluster import gpu_bundles
from async_opd.cluster.gpu_bundles import GpuBundles
from async_opd.core.errors import Displaced

FIRST, SECOND = (Unit((Bundle("rollout", index, 1),), least=1) for index in range(2))


@dataclass(frozen=True)
class Bundles(GpuBundles):
    """Of two units, the second of which is beyond what is needed; ``there`` have a place."""

    units: tuple[Unit, ...] = (FIRST, SECOND)
    there: set[Unit] = field(default_factory=lambda: {FIRST, SECOND})

    def asked(self, of: Collection[Unit] | None = None) -> dict[Unit, str | None]:
        return {unit: "b" if unit in self.there else None for unit in of or ()}


async def starts() -> str:
    await asyncio.sleep(0)
    return "engine"


async def never() -> str:
    await asyncio.Event().wait()
    return "engine"


async def loses() -> str:
    raise Displaced("student", "b is lost")


async def test_a_start_whose_machine_is_lost_is_an_error_only_of_a_replica_that_is_needed() -> None:
    bundles = Bundles()
    assert await bundles.unless_lost(("rollout", 0), starts()) == "engine"
    assert await bundles.unless_lost(("rollout", 1), starts()) == "engine"
    assert await bundles.unless_lost(("rollout", 1), loses()) is None
    with pytest.raises(Displaced):
        await bundles.unless_lost(("rollout", 0), loses())


@pytest.mark.parametrize("later", [False, True])
async def test_a_start_does_not_wait_for_a_place_that_is_lost(
    later: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gpu_bundles, "POLL_S", 0.001)
    bundles = Bundles()
    asyncio.get_running_loop().call_later(0.01 * later, bundles.there.clear)
    assert await asyncio.wait_for(bundles.unless_lost(("rollout", 1), never()), 5) is None
