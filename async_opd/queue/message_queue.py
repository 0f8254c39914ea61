"""The message queue between the stages: all topics of a run (``async_opd.queue.topic``), by name.

Plain asyncio in one event loop; ``async_opd.cluster.singleton_actors`` puts it into a Ray actor.

It also holds the images of everything that is in flight, by content hash, each of them once:

    keep(uid: hashes) ──lacking──► driver ──keep(bytes)──► held ──get(hashes)──► MediaCache
    drop(uids) ──► images without owners are evicted

An owner is a prompt, from before its group is put until the last of its rollouts is trained or a
dead letter, or an evaluation while it lasts. So leases, consumers that die, stale samples and those
that only the trainer still has change nothing here.
"""

from __future__ import annotations

import asyncio
import math
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace

from async_opd.core.batch import MESSAGE_BYTES, Batch, PayloadStore
from async_opd.core.errors import LeaseExpired, NotLeased, StageError
from async_opd.core.reports import Events
from async_opd.core.samples import Header
from async_opd.core.stages import SCORED, Ack, Lease, MediaStats, TopicStats, rollouts_topic
from async_opd.core.uid import Uid
from async_opd.media.cache import sound
from async_opd.processes.events import EventLog
from async_opd.queue.payloads import COLLECT_S, Claims, PayloadStores
from async_opd.queue.topic import Topic
from async_opd.waiting.deadline import Timer, loop_timer


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


class MessageQueue:
    """All topics of a run. Implements ``async_opd.core.stages.Queue`` in one process."""

    def __init__(
        self,
        topics: tuple[str, ...],
        max_samples: int,
        max_bytes: int,
        lease_s: float,
        timer: Timer | None = None,
        kept: tuple[str, ...] = (),
        lease_bytes: int = MESSAGE_BYTES,
        stores: PayloadStores | None = None,
    ) -> None:
        """Leases of topics in ``kept`` do not expire: they end by ``ack`` or ``release``.

        Without ``stores`` all payloads are in the batches.
        """
        self._timer = timer or loop_timer
        self._stores, self._claims = stores, Claims(self._timer)
        self._again: Counter[str] = Counter()  # samples to be scored again, by topic, to be logged
        self._warned: set[str] = set()  # nodes
        self._lease_s = lease_s
        self._event_log = EventLog()
        self._media = HeldMedia()
        self._topics = {
            name: Topic(
                max_samples,
                max_bytes,
                math.inf if name in kept else lease_s,
                self._timer,
                self._expiry_logger(name),
                lease_bytes,
                self._claims.drop,
            )
            for name in topics
        }

    async def put(self, topic: str, batch: Batch) -> None:
        """See Topic.put. Stored payloads are kept from now on until their samples leave."""
        self._claims.claim(batch)
        await self._topics[topic].put(batch)

    async def get(
        self,
        topic: str,
        at_most: int,
        at_least: int = 1,
        ack: Ack = None,
        consumer: str = "",
        share: bool = False,
        tokens: int | None = None,
        payloads: bool = True,
    ) -> Lease:
        """Acknowledges leases of the same topic first, in the same call; see Topic.get."""
        done = (ack,) if isinstance(ack, int) else ack or ()
        expired = [lease_id for lease_id in done if not self._topics[topic].ack(lease_id)]
        if expired:
            raise LeaseExpired(topic, expired[0])
        return await self._topics[topic].get(at_most, at_least, consumer, share, tokens, payloads)

    async def fetch(self, topic: str, leased: Mapping[int, Sequence[Uid]]) -> Batch:
        """See Topic.fetch, of several leases. Raises NotLeased with all that are not leased so."""
        found = [self._topics[topic].fetch(*one) for one in leased.items()]
        there = {row[0] for batch in found for row in batch.rows}
        gone = tuple(uid for uids in leased.values() for uid in uids if uid not in there)
        if gone:
            raise NotLeased(topic, gone)
        return Batch.join(found)

    async def ack(self, topic: str, lease_id: int) -> None:
        """See Topic.ack. Raises LeaseExpired."""
        if not self._topics[topic].ack(lease_id):
            raise LeaseExpired(topic, lease_id)

    async def renew(self, leases: Mapping[str, Sequence[int]]) -> float:
        """See Topic.renew. Returns the seconds after which leases expire that are not renewed."""
        for topic, lease_ids in leases.items():
            self._topics[topic].renew(lease_ids)
        return self._lease_s

    async def events(self, seen: int, wait: bool = True) -> Events:
        """Leases that expired after the line ``seen``; waits until there is one."""
        return await self._event_log.after(seen, wait)

    async def headers(self, topic: str) -> tuple[Header, ...]:
        """See Topic.headers."""
        return self._topics[topic].headers

    async def contents(self, topic: str, uids: Collection[Uid]) -> tuple[Batch, ...]:
        """See Topic.contents."""
        return self._topics[topic].contents(uids)

    async def score_again(self, topic: str, lost: Collection[int]) -> None:
        """See Queue.score_again. The rollouts are the first that their teachers get."""
        gone = self._topics[topic].take_out(lost)
        for teacher, rollouts in (one for batch in gone for one in batch.rollouts()):
            self._topics[rollouts_topic(teacher)].put_first(rollouts)
        if gone:
            if not self._again:
                self._timer(COLLECT_S, self._log_again)
            self._again[topic] += sum(map(len, gone))

    def _log_again(self) -> None:
        again, self._again = self._again, Counter()
        for topic, count in again.items():
            self._event_log.append(
                f"topic {topic}: {count} samples are scored again: their scores could not be read "
                "from their node within timeouts.request_s, or are lost: see whether a node or a "
                "process of its payloads has died; if none has, raise timeouts.request_s"
            )

    async def payload_store(self, node: str) -> PayloadStore:
        """See Queue.payload_store. StageError in a run without stores."""
        if self._stores is None:
            raise StageError("queue", "this run has no stores of payloads", "see queue.payloads")
        return await self._stores.open(node)

    async def keep_media(
        self,
        owned: Mapping[str, Sequence[str]],
        complete: bool = False,
        encoded: Mapping[str, bytes] | None = None,
    ) -> tuple[str, ...]:
        """See HeldMedia.keep."""
        return self._media.keep(owned, complete, encoded)

    async def media(self, hashes: Sequence[str]) -> dict[str, bytes]:
        """See HeldMedia.get."""
        return await self._media.get(hashes)

    async def drop_media(self, owners: Sequence[str]) -> None:
        """See HeldMedia.drop."""
        self._media.drop(owners)

    async def media_stats(self) -> MediaStats:
        """See HeldMedia.stats."""
        return self._media.stats

    async def release(self, topic: str, consumer: str) -> int:
        """See Topic.release."""
        return self._topics[topic].release(consumer)

    async def stats(self) -> dict[str, TopicStats]:
        """Counts of every topic."""
        found = {name: topic.stats for name, topic in self._topics.items()}
        if self._stores is not None:
            spilled = self._stores.spilled()
            found[SCORED] = replace(found[SCORED], spilled=sum(spilled.values()))
            self._warn_of_disks(spilled)
        return found

    def _warn_of_disks(self, spilled: Mapping[str, int]) -> None:
        """One message for each node whose object store writes to its disk."""
        for node, nbytes in spilled.items():
            if nbytes and node not in self._warned:
                self._warned.add(node)
                self._event_log.append(
                    f"scores do not fit into the memory of node {node}: {nbytes >> 20} MiB of its "
                    "object store were written to its disk, which is slow: lower queue.max_mib, or "
                    "give it more with ray start --object-store-memory"
                )

    def _expiry_logger(self, topic: str) -> Callable[[str], None]:
        return lambda text: self._event_log.append(f"topic {topic}: {text}")

    async def close(self) -> None:
        """Closes every topic."""
        for topic in self._topics.values():
            topic.close()
        if self._stores is not None:
            self._stores.close()
