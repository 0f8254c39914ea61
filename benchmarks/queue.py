"""Samples per second through the message queue, between two other processes.

    producer process ──put──► queue actor ──get──► consumer process

Three ways to move the same bytes, in turn and several times, of which medians are compared:

    queue        batches through ``async_opd``'s queue: leases, acknowledgements, bounds
    bare         the same buffers in the same batches through an actor that only relays them
    one_by_one   ``async_opd``'s queue with one call a sample, one after the other

``python -m benchmarks.queue`` prints one JSON object last; ratios are queue over the other.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import time
from collections import deque
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import ray

from async_opd.cluster.proxies import QueueProxy
from async_opd.cluster.remote import Remote
from async_opd.core.batch import Batch
from async_opd.core.samples import Prompt, Rollout, Sample, VersionSpan
from async_opd.core.scores import SampledLogprobs, TopK
from benchmarks.local_ray import on_local_ray

IN_FLIGHT = 4
"""Calls a producer or consumer has under way, as the stages do."""
DEPTH = 16
"""Batches that the queue and the bare relay hold at most: the producer cannot run ahead."""


@dataclass(frozen=True)
class Case:
    """One size of sample: response tokens, the teacher's k (0: sampled only), batch, samples."""

    tokens: int
    k: int
    batch: int
    samples: int


CASES = {
    "sampled_512": Case(tokens=512, k=0, batch=64, samples=6400),
    "topk_2048": Case(tokens=2048, k=64, batch=32, samples=320),
}


def sample(case: Case, index: int) -> Sample:
    """A sample with random content, so that nothing can be compressed or shared."""
    random = np.random.default_rng(index)
    tokens = case.tokens
    ids = random.integers(0, 150_000, tokens, dtype=np.int32)
    logprobs = random.standard_normal(tokens, dtype=np.float32)
    prompt = Prompt(f"p{index}", "s", "t", ids[:64])
    rollout = Rollout.plain(
        f"p{index}/0", prompt, ids, logprobs, (VersionSpan(0, 0, tokens),), "stop"
    )
    if case.k == 0:
        return Sample(rollout, SampledLogprobs(logprobs))
    topk_ids = random.integers(0, 150_000, (tokens, case.k), dtype=np.int32)
    topk = random.standard_normal((tokens, case.k), dtype=np.float32)
    return Sample(rollout, TopK(topk_ids, topk, logprobs))


class Relay:
    """A bare actor: it keeps each message and passes it on."""

    def __init__(self) -> None:
        self._items: asyncio.Queue[Any] = asyncio.Queue(DEPTH)

    async def ready(self) -> None:
        """Answers once the process is up."""

    async def put(self, item: Any) -> None:
        """Takes an item."""
        await self._items.put(item)

    async def get(self) -> Any:
        """Gives one."""
        return await self._items.get()


class Client:
    """A producer or a consumer in a separate process."""

    def prepare(self, case: Case, batch: int) -> None:
        """Packs one batch that is put again and again: packing is not the queue's work."""
        self._batch = Batch.pack(sample(case, index) for index in range(batch))

    async def produce(self, queue: QueueProxy, calls: int, in_flight: int) -> None:
        """Puts the batch so many times."""
        await _pipelined(lambda: queue.put("t", self._batch), calls, in_flight)

    async def consume(self, queue: QueueProxy, calls: int, batch: int, in_flight: int) -> None:
        """Gets and acknowledges everything, in as many loops as a stage has."""

        async def loop(own: int) -> None:
            done: int | None = None
            for _ in range(own):
                done = (await queue.get("t", batch, batch, done)).id
            if done is not None:
                await queue.ack("t", done)

        shares = [len(range(start, calls, in_flight)) for start in range(in_flight)]
        await asyncio.gather(*(loop(share) for share in shares))

    async def produce_bare(self, relay: Any, calls: int) -> None:
        """Puts the buffer so many times."""
        await _pipelined(lambda: relay.put.remote(self._batch.buffer), calls, IN_FLIGHT)

    async def consume_bare(self, relay: Any, calls: int) -> None:
        """Gets everything."""
        await _pipelined(lambda: relay.get.remote(), calls, IN_FLIGHT)


async def _pipelined(call: Callable[[], Awaitable[Any]], calls: int, in_flight: int) -> None:
    pending: deque[asyncio.Future[Any]] = deque()
    for _ in range(calls):
        if len(pending) == in_flight:
            await pending.popleft()
        pending.append(asyncio.ensure_future(_awaited(call())))
    await asyncio.gather(*pending)


async def _awaited(work: Awaitable[Any]) -> Any:
    return await work


async def through_queue(
    clients: list[Any], case: Case, batch: int, samples: int, in_flight: int
) -> float:
    """Samples per second through a fresh queue, until both ends are done."""
    producer, consumer = clients
    remote = Remote.create("queue", timeout_s=60)
    limits = (DEPTH * batch, 4 << 30, 600.0)
    await remote.build("async_opd.queue.message_queue:MessageQueue", (("t",), *limits), 60)
    queue, calls = QueueProxy(remote), samples // batch
    await producer.prepare.remote(case, batch)
    started = time.perf_counter()
    await asyncio.gather(
        _awaited(consumer.consume.remote(queue, calls, batch, in_flight)),
        _awaited(producer.produce.remote(queue, calls, in_flight)),
    )
    seconds = time.perf_counter() - started
    remote.kill()
    return samples / seconds


async def through_relay(clients: list[Any], case: Case) -> float:
    """Samples per second through a fresh bare actor, until both ends are done."""
    producer, consumer = clients
    relay = ray.remote(Relay).options(num_cpus=0, max_concurrency=1000).remote()
    await relay.ready.remote()
    calls = case.samples // case.batch
    await producer.prepare.remote(case, case.batch)
    started = time.perf_counter()
    await asyncio.gather(
        _awaited(consumer.consume_bare.remote(relay, calls)),
        _awaited(producer.produce_bare.remote(relay, calls)),
    )
    seconds = time.perf_counter() - started
    ray.kill(relay)
    return case.samples / seconds


async def measure(cases: Mapping[str, Case], repeats: int) -> dict[str, dict[str, float]]:
    """Medians over ``repeats`` rounds of the three ways in turn, after one round of warm-up."""
    client = ray.remote(Client).options(num_cpus=0)
    clients = [client.remote(), client.remote()]
    results = {}
    for name, case in cases.items():
        rates: dict[str, list[float]] = {"queue": [], "bare": [], "one_by_one": []}
        for repeat in range(repeats + 1):
            few = max(case.samples // 10, 32)
            found = {
                "queue": await through_queue(clients, case, case.batch, case.samples, IN_FLIGHT),
                "bare": await through_relay(clients, case),
                "one_by_one": await through_queue(clients, case, 1, few, 1),
            }
            if repeat:
                for key, value in found.items():
                    rates[key].append(value)
                print(name, {key: round(value) for key, value in found.items()}, flush=True)
        queue, bare, single = (statistics.median(rates[key]) for key in rates)
        results[name] = {
            "samples_per_s": round(queue, 1),
            "bare_ratio": round(queue / bare, 3),
            "one_by_one_ratio": round(queue / single, 2),
        }
    return results


def main() -> None:
    """Measures on a local Ray cluster."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--only", nargs="+", choices=CASES, default=list(CASES))
    parser.add_argument("--batches", type=int, help="of each case")
    given = parser.parse_args()
    cases = {name: CASES[name] for name in given.only}
    if given.batches:
        cases = {n: replace(case, samples=given.batches * case.batch) for n, case in cases.items()}
    print(json.dumps(on_local_ray(measure(cases, given.repeats))))


if __name__ == "__main__":
    main()
