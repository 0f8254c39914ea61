"""The images of what is in flight: put into the queue before their groups, dropped after the last.

groups ──hold──► queue (each image once) ──► topic prompts
ledger ──release: prompts that are not in flight any more──► queue drops their images
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Iterable, Sequence
from contextlib import asynccontextmanager, suppress

from async_opd.accounting.ledger import Ledger
from async_opd.core.batch import MESSAGE_BYTES, Batch, cut
from async_opd.core.errors import StageError
from async_opd.core.row import Media
from async_opd.core.samples import Group, Prompt
from async_opd.core.stages import PROMPTS, Queue
from async_opd.core.uid import Uid

BATCHES_AHEAD = 2
"""Batches in flight below which images never delay a group: the trainer waits for one of them, and
fetches the next. Only what it trains makes room."""


class ImagesInFlight:
    """The driver's account of the images that the queue holds for prompts in flight."""

    def __init__(self, ledger: Ledger, batch_size: int, max_bytes: int) -> None:
        """``max_bytes`` bounds the held images, except for ``BATCHES_AHEAD`` batches."""
        self._ledger = ledger
        self._always = BATCHES_AHEAD * batch_size
        self._max_bytes = max_bytes
        self._prompts: dict[Uid, tuple[Media, ...]] = {}
        self._users: Counter[Media] = Counter()
        self._others: dict[str | Uid, list[Prompt]] = {}  # by owner: those of evaluations
        self._begun = False  # the queue has received which images to hold
        self._unissued = 0  # samples in flight whose groups wait for room
        self._released = asyncio.Event()
        self._calls = asyncio.Lock()  # so that no drop overtakes a keep

    @property
    def held_bytes(self) -> int:
        """Bytes of the images of all prompts in flight, each image once."""
        return sum(media.nbytes for media in self._users)

    @property
    def metrics(self) -> dict[str, float]:
        """Images in the queue for prompts in flight, and their bytes."""
        return {
            "queue/images": float(len(self._users)),
            "queue/image_bytes": float(self.held_bytes),
        }

    async def put(self, queue: Queue, groups: Sequence[Group], waits: bool = False) -> None:
        """Groups ──► topic ``prompts``, a message at a time, each after its images.

        With ``waits`` a message waits for room for images that are new: groups of samples that were
        admitted before take no more room than they had.
        """
        await self.release(queue)
        self._unissued += sum(len(group.members) for group in groups) if waits else 0
        for part in cut(groups, _image_bytes):
            if waits:
                await self._room(part)
                self._unissued -= sum(len(group.members) for group in part)
            await self.hold(queue, part)
            for batch in Batch.packed(part):
                await queue.put(PROMPTS, batch)

    async def hold(self, queue: Queue, groups: Iterable[Group], again: bool = False) -> None:
        """Puts the images of groups in flight that the queue lacks. StageError; see ``bring``.

        ``again``: the groups are all that is in flight.
        """
        prompts = {group.prompt.uid: group.prompt for group in groups if group.prompt.media}
        if not (prompts or again):
            return
        async with self._calls:
            for uid, prompt in prompts.items():
                if uid not in self._prompts:
                    self._prompts[uid] = prompt.media
                    self._users.update(set(prompt.media))
            owned: dict[str | Uid, list[Prompt]] = {uid: [one] for uid, one in prompts.items()}
            owned |= self._others if again else {}
            await bring(queue, owned, complete=again or not self._begun)
            self._begun = True

    async def hold_all(self, queue: Queue) -> None:
        """Puts the images of all that is in flight into a new queue, or after a resume.

        Also those of what only the trainer has, and of evaluations that are under way.
        """
        await self.hold(queue, self._ledger.unfinished_groups(()), again=True)

    @asynccontextmanager
    async def kept(
        self, queue: Queue, owner: str, prompts: Iterable[Prompt]
    ) -> AsyncIterator[None]:
        """As the function ``kept``; a queue that is restarted meanwhile gets the images again."""
        prompts = [prompt for prompt in prompts if prompt.media]
        self._others[owner] = prompts  # first: the queue may die while it gets them
        try:
            async with kept(queue, owner, prompts):
                yield
                async with self._calls:  # a ``hold_all`` under way would keep them after the drop
                    del self._others[owner]
        finally:
            self._others.pop(owner, None)

    async def release(self, queue: Queue) -> None:
        """Drops the images of prompts none of whose rollouts is in flight any more."""
        self._released.set()  # fewer samples are in flight, whether they had images or not
        if not self._prompts:
            return
        async with self._calls:
            gone = list(self._prompts.keys() - self._ledger.prompts_in_flight)
            for uid in gone:
                self._users.subtract(set(self._prompts.pop(uid)))
            self._users = +self._users  # those with a user
            if gone:
                await queue.drop_media(gone)
        self._released.set()

    async def _room(self, groups: Iterable[Group]) -> None:
        media = {media for group in groups for media in group.prompt.media}
        while True:
            new = sum(one.nbytes for one in media if one not in self._users)
            issued = len(self._ledger) - self._unissued
            if not new or self.held_bytes + new <= self._max_bytes or issued < self._always:
                return
            self._released.clear()
            await self._released.wait()


async def bring(queue: Queue, owned: dict[str | Uid, list[Prompt]], complete: bool = False) -> None:
    """Has the queue keep the images of each owner's prompts; sends the bytes that it lacks.

    ``complete``: see Queue.keep_media.
    StageError with uid and hash for an image whose bytes the driver does not have.
    """
    found = {uid: [m.sha256 for p in prompts for m in p.media] for uid, prompts in owned.items()}
    of = {m.sha256: p for prompts in owned.values() for p in prompts for m in p.media}
    lacking = await queue.keep_media(found, complete)
    while lacking:  # after a queue's restart all owners must be registered again
        for sha256 in lacking:
            if sha256 not in of[sha256].encoded:
                cause = f"image {sha256} of prompt {of[sha256].uid} was not read with its row"
                raise StageError("prompts", cause, "see whether the data source has changed")
        part = next(cut(lacking, lambda sha256: len(of[sha256].encoded[sha256])))
        encoded = {sha256: of[sha256].encoded[sha256] for sha256 in part}
        lacking = await queue.keep_media(found, complete, encoded)


@asynccontextmanager
async def kept(queue: Queue, owner: str, prompts: Iterable[Prompt]) -> AsyncIterator[None]:
    """The queue has the images of prompts that are not in flight, as those of an evaluation.

    ``owner`` names the process that needs them; no two at the same time may have the same name.
    """
    with_images = [prompt for prompt in prompts if prompt.media]
    if not with_images:
        yield
        return
    try:
        await bring(queue, {owner: with_images})
        yield
    except BaseException:
        with suppress(Exception):  # what failed first is raised
            await queue.drop_media([owner])
        raise
    await queue.drop_media([owner])


def _image_bytes(group: Group) -> int:
    return min(sum(media.nbytes for media in group.prompt.media), MESSAGE_BYTES)
