"""How often an image crosses a process border on its way through a run.

    this process, the driver ──images──► queue actor ──images──► students, teacher, ranks 0 and 1
         └──groups──► prompts ──► students ──rollouts──► scorer, teacher ──samples──► ranks

The queue, the actors, the caches, a student replica's worker and the driver's account of images are
those of a run; engines and ranks compute nothing, and ask for the images of what they get. Every
message of every process is counted, pickled, in both directions: prompts, rollouts, samples and
images. An image is random bytes, which nothing compresses.

    samples        that were trained
    image_kib      encoded bytes of an image, one for each prompt
    copies         bytes that cross process borders for a sample, over those of its image
    images_only    the same, of images alone

``python -m benchmarks.media`` prints one JSON object last.
"""

from __future__ import annotations

import argparse
import asyncio
import hashlib
import json
import pickle
import random
from collections.abc import Sequence
from typing import Any

import numpy as np

from async_opd.accounting.images import ImagesInFlight
from async_opd.accounting.ledger import Ledger
from async_opd.cluster.proxies import QueueProxy
from async_opd.cluster.remote import Remote
from async_opd.core.batch import Batch, unpack
from async_opd.core.row import Media
from async_opd.core.samples import Prompt, Rollout, Sample, VersionSpan
from async_opd.core.scores import SampledLogprobs
from async_opd.core.stages import DEAD, PROMPTS, SCORED, rollouts_topic, topics
from async_opd.media.cache import FromQueue, MediaCache
from benchmarks.local_ray import on_local_ray
from rollouter.rollout_worker import RolloutWorker
from rollouter.slots import Slots

BOUND_S, CACHE_BYTES, TEACHER = 120.0, 256 << 20, "t"
PROMPT_TOKENS, RESPONSE_TOKENS, BATCH = 320, 512, 64


class Counted:
    """A queue whose calls and answers are counted: pickled bytes, and those of images."""

    def __init__(self, queue: QueueProxy) -> None:
        self._queue, self.nbytes, self.images = queue, 0, 0

    def __getattr__(self, name: str) -> Any:
        async def call(*args: Any, **named: Any) -> Any:
            answer = await getattr(self._queue, name)(*args, **named)
            self.nbytes += len(pickle.dumps((args, named, answer), protocol=5))
            if name == "media":
                self.images += sum(map(len, answer.values()))
            if name == "keep_media":
                encoded = args[2] if len(args) > 2 else None
                self.images += sum(map(len, (encoded or {}).values()))
            return answer

        return call


class Consumer:
    """Shared by all consumers: the counted queue, and a cache of images that fetches from it."""

    def __init__(self, queue: QueueProxy) -> None:
        self.queue: Any = Counted(queue)
        self._media = MediaCache(FromQueue(self.queue), CACHE_BYTES)

    async def see(self, prompt: Prompt, uid: str) -> None:
        """Asks for the images of a prompt, as an engine or a rank does."""
        await self._media.get(prompt.media, uid)

    async def counted(self) -> tuple[int, int]:
        """Bytes of all messages, and of the images in them."""
        return self.queue.nbytes, self.queue.images


class Student(Consumer):
    """A student replica without an engine."""

    def __init__(self, queue: QueueProxy, name: str, n: int) -> None:
        super().__init__(queue)
        self._worker = RolloutWorker(name, self.queue, Slots(4 * n, n), self._sample)

    async def run(self) -> None:
        """Makes rollouts until the actor ends."""
        await self._worker.run()

    async def _sample(self, prompt: Prompt, uid: Any) -> Rollout:
        await self.see(prompt, uid)
        ids = np.random.default_rng(len(uid)).integers(0, 150_000, RESPONSE_TOKENS, np.int32)
        logprobs = np.linspace(-1, 0, RESPONSE_TOKENS, dtype=np.float32)
        spans = (VersionSpan(0, 0, RESPONSE_TOKENS),)
        return Rollout.plain(uid, prompt, ids, logprobs, spans, "length")


class Teacher(Consumer):
    """A teacher replica without an engine."""

    async def score(self, batch: Batch) -> Batch:
        """Rollouts become samples."""
        samples = []
        for rollout in unpack(Rollout, [batch]):
            await self.see(rollout.prompt, rollout.uid)
            samples.append(Sample(rollout, SampledLogprobs(rollout.rollout_logprobs)))
        return Batch.pack(samples)


class Scorer(Consumer):
    """The scoring stage: what it leases goes to the replica, and back."""

    def __init__(self, queue: QueueProxy, teacher: Remote) -> None:
        super().__init__(queue)
        self._teacher = teacher

    async def run(self) -> None:
        """Has rollouts scored until the actor ends."""
        done: int | None = None
        while True:
            lease = await self.queue.get(rollouts_topic(TEACHER), 16, ack=done)
            for asked in lease.batches:
                answer = await self._teacher.call("score", asked, timeout_s=BOUND_S)
                self.queue.nbytes += sum(len(pickle.dumps(one)) for one in (asked, answer))
                await self.queue.put(SCORED, answer)
            done = lease.id


class Rank(Consumer):
    """A rank of the trainer: it fetches the samples that it is assigned, and their images."""

    async def compute(self, leased: dict[int, list[Any]]) -> int:
        """The number of samples."""
        batch = await self.queue.fetch(SCORED, leased)
        samples = unpack(Sample, [batch])
        for sample in samples:
            await self.see(sample.rollout.prompt, sample.rollout.uid)
        return len(samples)


def prompts(count: int, image_bytes: int) -> list[Prompt]:
    """Prompts with one image each; every fourth has that of the one before."""
    made = []
    for number in range(count):
        content = random.Random(number - (number % 4 == 3)).randbytes(image_bytes)
        media = Media(hashlib.sha256(content).hexdigest(), image_bytes, 512, 512)
        ids = np.arange(PROMPT_TOKENS, dtype=np.int32)
        encoded = {media.sha256: content}
        own = (f"p{number}", "s", TEACHER, ids)
        made.append(Prompt(*own, media=(media,), encoded=encoded))  # type: ignore[arg-type]
    return made


async def actor(kind: str, name: str, *args: Any) -> Remote:
    """A separate process with an object of this module."""
    made = Remote.create(name, timeout_s=BOUND_S)
    await made.build(f"benchmarks.media:{kind}", args, BOUND_S)
    return made


async def measured(steps: int, n: int, ranks: int, students: int, kib: int) -> dict[str, Any]:
    """All prompts of ``steps`` batches through the queue, and the bytes of all processes."""
    queue_actor = Remote.create("queue", timeout_s=BOUND_S)
    limits = (topics([TEACHER]), 4096, 4 << 30, 600.0, None, (PROMPTS, DEAD))
    await queue_actor.build("async_opd.queue.message_queue:MessageQueue", limits, BOUND_S)
    queue: Any = Counted(proxy := QueueProxy(queue_actor))
    names = [f"student_{index}" for index in range(students)]
    workers = [await actor("Student", name, proxy, name, n) for name in names]
    teacher = await actor("Teacher", "teacher", proxy)
    workers.append(await actor("Scorer", "scorer", proxy, teacher))
    computing = [await actor("Rank", f"rank_{rank}", proxy) for rank in range(ranks)]
    running = [asyncio.create_task(one.call("run", timeout_s=float("inf"))) for one in workers]
    ledger = Ledger(n)
    images = ImagesInFlight(ledger, BATCH, 1 << 30)
    groups = ledger.admitted(prompts(steps * BATCH // n, kib << 10))
    issuing = asyncio.create_task(images.put(queue, groups, waits=True))
    for step in range(1, steps + 1):
        await asyncio.wait_for(train(queue, computing, ledger, step), BOUND_S)
        await images.release(queue)
    await issuing
    counts = [(queue.nbytes, queue.images)]
    counts += [
        await one.call("counted", timeout_s=BOUND_S) for one in (*workers, teacher, *computing)
    ]
    stats = await queue.media_stats()
    for task in running:
        task.cancel()
    nbytes, seen = (sum(part) for part in zip(*counts, strict=True))
    samples = steps * BATCH
    return {
        "samples": samples,
        "n": n,
        "ranks": ranks,
        "students": students,
        "image_kib": kib,
        "held_at_the_end": stats.images,
        "images_only": round(seen / samples / (kib << 10), 3),
        "copies": round(nbytes / samples / (kib << 10), 3),
    }


async def train(queue: Any, ranks: Sequence[Remote], ledger: Ledger, step: int) -> None:
    """One batch: leased as headers, assigned to the ranks sample by sample, and acknowledged."""
    lease = await queue.get(SCORED, BATCH, BATCH, payloads=False)
    headers = [header for batch in lease.batches for header in batch.headers]
    shares = [[one.uid for one in headers[rank :: len(ranks)]] for rank in range(len(ranks))]
    work = (
        rank.call("compute", {lease.id: uids}, timeout_s=BOUND_S)
        for rank, uids in zip(ranks, shares, strict=True)
    )
    found = await asyncio.gather(*work)
    assert sum(found) == BATCH, found
    await queue.ack(SCORED, lease.id)
    ledger.trained(headers, step)


def main() -> None:
    """Prints one JSON object."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--n", type=int, default=8, help="rollouts a prompt")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--students", type=int, default=2)
    parser.add_argument("--image-kib", type=int, default=90)
    args = parser.parse_args()
    work = measured(args.steps, args.n, args.ranks, args.students, args.image_kib)
    print(json.dumps(on_local_ray(work)))


if __name__ == "__main__":
    main()
