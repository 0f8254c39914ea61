"""A real engine of two workers on CPUs: transfers that break off, and those that follow them."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from tests.engines import QUICKSTART
from tests.rollouter.test_student_engine import world

pytestmark = [pytest.mark.engine, pytest.mark.long]  # its start takes minutes


@pytest.fixture(scope="module")
def seen() -> dict[str, Any]:
    """Distances from transformers' log-probabilities, and errors of transfers."""

    async def scenario() -> dict[str, Any]:
        async with world(QUICKSTART / "models" / "student", workers=2) as w:
            await w.push()
            found: dict[str, Any] = {"first": await w.error()}
            found["broken off"] = await w.transfer_that_breaks_off()
            await w.push()
            found["after it"] = await w.error()
            found["mixed"] = await w.load_that_breaks_off()
            await w.replica._rpc("record_received")
            await w.push()
            found["after mixed"] = await w.error()
            found["digests"] = await w.replica._rpc("loaded_digests")
        return found

    return asyncio.run(scenario())


def test_both_workers_get_the_weights_or_keep_the_old_ones(seen: dict[str, Any]) -> None:
    words, distance = seen["broken off"]
    assert "broke off" in words
    assert max(seen["first"], distance, seen["after it"]) < 1e-4


def test_after_a_broken_load_both_wait_for_the_next_transfer(seen: dict[str, Any]) -> None:
    transfer, resume, paused = seen["mixed"]
    assert "broke off" in transfer
    assert "it stays paused: update_weights failed in its engine: worker 0" in resume
    assert "some weights were replaced" in resume
    assert paused
    assert seen["after mixed"] < 1e-4


def test_each_worker_answers_for_itself_after_all_this(seen: dict[str, Any]) -> None:
    one, other = seen["digests"]
    assert one.keys() == other.keys()
    assert one != other
