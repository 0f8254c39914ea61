"""The images that one process has, by content: fetched once, and kept up to a bound in bytes.

get(media) ──not there──► fetch(hashes) ──SHA-256──► kept, least recently used first out
    ▲ several at once wait for the same fetch ──────┘
"""

from __future__ import annotations

import asyncio
import hashlib
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace

from async_opd.core.errors import RolloutFault, StageTimeout
from async_opd.core.reports import StageReport
from async_opd.core.row import Media
from async_opd.core.stages import Queue

Fetch = Callable[[Sequence[str]], Awaitable[Mapping[str, bytes]]]
"""Encoded bytes by SHA-256; hashes whose bytes no process holds are left out (``Queue.media``)."""
FETCH_S = 300.0
"""Seconds after which a fetch has failed, where no other bound is given."""
REMEDY = "resume the run: the driver reads images again from the data source"
SLOW = (
    "raise timeouts.request_s if the queue's node is only slow, or if a queue that was restarted "
    "gets very many images again; otherwise see the queue's log"
)


@dataclass(frozen=True)
class FromQueue:
    """Fetches from the queue. It can be pickled, where a method of a proxy cannot."""

    queue: Queue

    async def __call__(self, hashes: Sequence[str]) -> Mapping[str, bytes]:
        """See Queue.media."""
        return await self.queue.media(hashes)


@dataclass
class MediaCounts:
    """Totals since the start: bytes that were fetched, images asked for, and those found here."""

    fetched_bytes: int = 0
    asked: int = 0
    hits: int = 0


class MediaCache:
    """Encoded images by SHA-256, at most ``max_bytes`` of them between two calls.

    For one event loop. Until its first ``get`` it can be pickled, if ``fetch`` can.
    """

    def __init__(self, fetch: Fetch, max_bytes: int, timeout_s: float = FETCH_S) -> None:
        """``timeout_s`` bounds each fetch."""
        self._fetch = fetch
        self._max_bytes = max_bytes
        self._timeout_s = timeout_s
        self._kept: OrderedDict[str, bytes] = OrderedDict()
        self._fetching: dict[str, asyncio.Task[dict[str, bytes]]] = {}
        self._counts = MediaCounts()
        self._reported = MediaCounts()
        self.held_bytes = 0
        """Bytes of all images that are kept now."""

    async def get(self, media: Sequence[Media], of: str = "") -> list[bytes]:
        """The encoded bytes of each image, in order; ``of`` is the uid that errors name.

        An image that is fetched already for another caller is waited for. RolloutFault for an image
        that no process holds, or whose bytes have another SHA-256; StageTimeout after
        ``timeout_s``; what ``fetch`` raises. A failed fetch fails for all its callers, and the next
        call repeats it.
        """
        hashes = list(dict.fromkeys(one.sha256 for one in media))
        found = {sha256: self._kept[sha256] for sha256 in hashes if sha256 in self._kept}
        for sha256 in found:
            self._kept.move_to_end(sha256)
        self._counts.asked += len(hashes)
        self._counts.hits += len(found)
        new = [one for one in hashes if one not in found and one not in self._fetching]
        if new:
            task = asyncio.create_task(self._fetched(new), name=f"images of {of}")
            task.add_done_callback(_retrieved)
            self._fetching |= dict.fromkeys(new, task)
        waited = {one: self._fetching[one] for one in hashes if one not in found}
        for sha256, task in waited.items():
            arrived = await asyncio.shield(task)
            if sha256 not in arrived:
                raise _absent(sha256, of)
            found[sha256] = arrived[sha256]
        _refuse_wrong(found, waited, of)
        return [found[one.sha256] for one in media]

    def report(self) -> dict[str, float]:
        """Bytes fetched, images asked for and found here since the last report; bytes held now."""
        now, before = asdict(self._counts), asdict(self._reported)
        self._reported = MediaCounts(**now)
        return {
            "image_fetched_bytes": float(now["fetched_bytes"] - before["fetched_bytes"]),
            "image_asked": float(now["asked"] - before["asked"]),
            "image_hits": float(now["hits"] - before["hits"]),
            "image_held_bytes": float(self.held_bytes),
        }

    async def _fetched(self, hashes: list[str]) -> dict[str, bytes]:
        try:
            async with asyncio.timeout(self._timeout_s) as bound:
                arrived = dict(await self._fetch(hashes))
        except TimeoutError as error:
            if not bound.expired():
                raise
            cause = f"{len(hashes)} images were not fetched within {self._timeout_s:g} s"
            raise StageTimeout("images", f"{cause}; the first is {hashes[0]}", SLOW) from error
        finally:
            for sha256 in hashes:
                del self._fetching[sha256]
        self._counts.fetched_bytes += sum(map(len, arrived.values()))
        self._keep(arrived)
        return arrived

    def _keep(self, arrived: Mapping[str, bytes]) -> None:
        """Keeps bytes that are what their hash says, and drops what was not used for longest."""
        for sha256, encoded in arrived.items():
            if len(encoded) > self._max_bytes or sha256 in self._kept or not sound(sha256, encoded):
                continue
            self._kept[sha256] = encoded
            self.held_bytes += len(encoded)
        while self.held_bytes > self._max_bytes:
            _, dropped = self._kept.popitem(last=False)
            self.held_bytes -= len(dropped)


def with_images(report: StageReport, media: MediaCache | None) -> StageReport:
    """A stage's report with the numbers of its cache, if it has one."""
    if media is None:
        return report
    found = media.report()
    held = {"image_held_bytes": found.pop("image_held_bytes")}
    return replace(report, counters={**report.counters, **found}, gauges={**report.gauges, **held})


def sound(sha256: str, encoded: bytes) -> bool:
    """Whether the bytes have this SHA-256."""
    return hashlib.sha256(encoded).hexdigest() == sha256


def _refuse_wrong(found: Mapping[str, bytes], arrived: Iterable[str], of: str) -> None:
    for sha256 in arrived:
        if not sound(sha256, found[sha256]):
            seen = hashlib.sha256(found[sha256]).hexdigest()
            cause = f"image {sha256}{_named(of)} came as {len(found[sha256])} bytes"
            raise RolloutFault("prompt", f"{cause} whose SHA-256 is {seen}", REMEDY)


def _absent(sha256: str, of: str) -> RolloutFault:
    cause = f"image {sha256}{_named(of)} is not held by the queue"
    remedy = "the sample was trained or given up meanwhile, and its image dropped; otherwise "
    return RolloutFault("prompt", cause, remedy + REMEDY)


def _named(of: str) -> str:
    return f" of {of}" if of else ""


def _retrieved(task: asyncio.Task[dict[str, bytes]]) -> None:
    """The error of a fetch reaches its waiters; where all of them were cancelled, no caller."""
    if not task.cancelled():
        task.exception()
