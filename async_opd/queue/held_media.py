"""The images of everything that is in flight, by content hash, each of them once.

    keep(uid: hashes) ──lacking──► driver ──keep(bytes)──► held ──get(hashes)──► MediaCache
    drop(uids) ──► images without owners are evicted

An owner is a prompt, from before its group is put until the last of its rollouts is trained or a
dead letter, or an evaluation while it lasts. So leases, consumers that die, stale samples and those
that only the trainer still has change nothing here.
"""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

from async_opd.core.errors import StageError
from async_opd.core.lease import MediaStats
from async_opd.media.cache import sound


@dataclass
class HeldMedia:
    """Encoded images in the queue's process."""

    _bytes: dict[str, bytes] = field(default_factory=dict)
    _kept: dict[str, tuple[str, ...]] = field(default_factory=dict)
    _owners: dict[str, set[str]] = field(default_factory=dict)
    _changed: asyncio.Event = field(default_factory=asyncio.Event)
    """Set when the next bytes come, and when others may not come any more."""
    _complete: bool = False
    _added_bytes: int = 0
    _fetched_bytes: int = 0

    def keep(
        self,
        owned: Mapping[str, Sequence[str]],
        complete: bool = False,
        encoded: Mapping[str, bytes] | None = None,
    ) -> tuple[str, ...]:
        """Each owner keeps these hashes until ``drop``. Returns those whose bytes are not held.

        ``encoded`` are bytes of some of them. ``complete``: together with these, all images are
        kept that anything in flight needs. From then on an image without an owner is one of a
        sample that was trained or given up. StageError for bytes with another hash.
        """
        self._complete |= complete
        for owner, hashes in owned.items():
            before = self._kept.get(owner, ())
            self._kept[owner] = tuple(dict.fromkeys((*before, *hashes)))
            for sha256 in hashes:
                self._owners.setdefault(sha256, set()).add(owner)
        self._add(encoded or {})
        wanted = dict.fromkeys(one for hashes in owned.values() for one in hashes)
        return tuple(one for one in wanted if one not in self._bytes)

    def _add(self, encoded: Mapping[str, bytes]) -> None:
        for sha256, content in encoded.items():
            if sha256 not in self._owners or sha256 in self._bytes:
                continue
            if not sound(sha256, content):
                cause = f"{len(content)} bytes came as image {sha256}, which they are not"
                raise StageError("queue", cause, "the data source changed while it was read")
            self._bytes[sha256] = content
            self._added_bytes += len(content)
        self._change()

    def _change(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()

    async def get(self, hashes: Collection[str]) -> dict[str, bytes]:
        """The bytes of these images, without those that have no owner.

        Waits for kept ones whose bytes are to come, and for all until ``complete``: a queue that
        was restarted gets all again from the driver, while consumers go on with what they had
        leased before. Its caller bounds the wait (``MediaCache``), which lasts as long as it takes
        to send them all.
        """
        while any(map(self._comes, hashes)):
            await self._changed.wait()
        found = {one: self._bytes[one] for one in hashes if one in self._bytes}
        self._fetched_bytes += sum(map(len, found.values()))
        return found

    def _comes(self, sha256: str) -> bool:
        """Whether the image is not held, but may be soon."""
        return sha256 not in self._bytes and (sha256 in self._owners or not self._complete)

    def drop(self, owners: Collection[str]) -> None:
        """These owners keep nothing any more; unknown ones are ignored."""
        for owner in owners:
            for sha256 in self._kept.pop(owner, ()):
                left = self._owners[sha256]
                left.discard(owner)
                if not left:
                    del self._owners[sha256]
                    self._bytes.pop(sha256, None)
        self._change()

    @property
    def stats(self) -> MediaStats:
        """Counts now, and totals since the start."""
        held = sum(map(len, self._bytes.values()))
        return MediaStats(len(self._bytes), held, self._added_bytes, self._fetched_bytes)
