"""The driver puts an image once, drops it after its last rollout, and waits for room."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest

from async_opd.accounting.images import ImagesInFlight, kept
from async_opd.accounting.ledger import Ledger
from async_opd.core.errors import ConfigError, StageError
from async_opd.core.samples import NO_VERSION, Group, Header, Prompt
from async_opd.core.stages import PROMPTS
from tests.world.clock import settle
from tests.world.prompts import with_images
from tests.world.queue import MortalQueue

IMAGE = 10


def prompt(uid: str, *images: int) -> Prompt:
    plain = Prompt(uid, "s", "t", np.zeros(3, np.int32))
    return with_images(plain, *(bytes([number]) * IMAGE for number in images))


class Driver:
    """The queue, the ledger of groups of two, and the images; batches have two samples."""

    def __init__(self, max_images: int = 100) -> None:
        self.queue: Any = MortalQueue()
        self.ledger = Ledger(2)
        self.images = ImagesInFlight(self.ledger, batch_size=2, max_bytes=max_images * IMAGE)

    def admitted(self, *prompts: Prompt) -> list[Group]:
        return self.ledger.admitted(prompts)

    def trained(self, *uids: str) -> None:
        self.ledger.trained([Header(uid, 3, 0, NO_VERSION, "t") for uid in uids], 1)

    async def put(self, groups: Sequence[Group], waits: bool = False) -> None:
        await self.images.put(self.queue, groups, waits)

    async def held(self) -> int:
        return int((await self.queue.media_stats()).images)


async def test_an_image_comes_once_and_goes_after_the_last_rollout_of_its_last_prompt() -> None:
    driver = Driver()
    groups = driver.admitted(prompt("p", 1), prompt("q", 1, 2))
    await driver.put(groups)
    await driver.put([replace(groups[0], members=(1,))])  # again: it brings no bytes
    assert (await driver.queue.media_stats()).added_bytes == 2 * IMAGE
    assert len(await driver.queue.headers(PROMPTS)) == 3
    held = [await driver.held()]
    for uids in (["p/0", "p/1"], ["q/0"], ["q/1"]):
        driver.trained(*uids)
        await driver.images.release(driver.queue)
        held.append(await driver.held())
    assert held == [2, 2, 2, 0]


@pytest.mark.parametrize(
    ("before", "new", "trained"),
    [
        ((prompt("p", 1), prompt("q", 2)), prompt("r", 3), ("p/0", "p/1")),
        ((prompt("p"), prompt("q")), prompt("r", 1, 2), ("p/0", "p/1", "q/0", "q/1")),
    ],
    ids=["behind images", "behind text alone"],
)
async def test_new_images_wait_for_room_when_two_batches_are_in_flight(
    before: Sequence[Prompt], new: Prompt, trained: Sequence[str]
) -> None:
    driver = Driver(max_images=1)
    await driver.put(driver.admitted(*before), waits=True)  # the trainer needs them
    waiting = asyncio.create_task(driver.put(driver.admitted(new), waits=True))
    await settle(20)
    assert not waiting.done()
    driver.trained(*trained)
    await driver.images.release(driver.queue)
    async with asyncio.timeout(5):
        await waiting
    assert await driver.held() == 2


async def test_prompts_without_new_images_and_those_admitted_before_do_not_wait() -> None:
    driver = Driver(max_images=1)
    await driver.put(driver.admitted(prompt("p", 1), prompt("q", 2)), waits=True)
    await driver.put(driver.admitted(prompt("r", 2), prompt("s")), waits=True)
    assert len(await driver.queue.headers(PROMPTS)) == 4
    await driver.put(driver.admitted(prompt("t", 3)))
    assert await driver.held() == 3


async def test_an_image_whose_bytes_were_not_read_is_an_error_with_uid_and_hash() -> None:
    driver, bare = Driver(), replace(prompt("p", 1), encoded={})
    with pytest.raises(StageError, match=f"image {bare.media[0].sha256} of prompt p was not read"):
        await driver.put(driver.admitted(bare))


async def test_images_of_an_evaluation_are_held_while_it_lasts_also_by_a_new_queue() -> None:
    driver = Driver()
    await driver.put(driver.admitted(prompt("p", 1)))
    async with driver.images.kept(driver.queue, "eval", [prompt("e", 1, 2), prompt("f")]):
        assert await driver.held() == 2
        driver.queue.die()
        await driver.images.hold_all(driver.queue)
        assert await driver.held() == 2
    assert await driver.held() == 1
    await driver.images.hold_all(driver.queue)
    assert await driver.held() == 1


async def test_the_error_of_an_evaluation_is_raised_where_its_images_cannot_be_dropped() -> None:
    driver = Driver()

    async def unreachable(owners: Sequence[str]) -> None:
        raise StageError("queue", "its process died")

    lost = patch.object(driver.queue, "drop_media", unreachable)
    with lost, pytest.raises(ZeroDivisionError):
        async with kept(driver.queue, "evaluation 1", [prompt("e", 1)]):
            raise ZeroDivisionError


async def test_after_a_resume_all_images_in_flight_are_brought_again() -> None:
    before, found = Ledger(2), {"p": prompt("p", 1), "q": prompt("q")}
    before.admitted(found.values())
    driver = Driver()
    driver.ledger.restore(before.state(), found.__getitem__)
    await driver.images.hold_all(driver.queue)
    assert await driver.held() == 1


def test_another_image_of_a_prompt_in_flight_is_refused_at_a_resume() -> None:
    before = Ledger(2)
    before.admitted([prompt("p", 1), prompt("q", 2)])
    with pytest.raises(ConfigError) as refused:
        Ledger(2).restore(before.state(), {"p": prompt("p", 3), "q": prompt("q", 2)}.__getitem__)
    (problem,) = refused.value.problems
    assert problem.message.startswith("prompt p was sampled with images")
    assert prompt("p", 3).media[0].sha256 in problem.message
