"""The teachers' balancer: how fast it decides, what a death costs, how even the load is.

    decisions   one process: take a place, give it back, replicas half full
    killed      400 requests, 32 at once, over 4 replicas in Ray actors through ``TeacherPool``;
                one is killed in the middle. Beside it: the same over 3 healthy replicas
    imbalance   long and short requests mixed: the busiest replica's tokens over the mean

A replica takes the time of its tokens, one request at a time, as an engine's prefill does.
``python -m benchmarks.balancer`` prints one JSON object last.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import statistics
import time
from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np

from async_opd.cluster.proxies import TeacherProxy
from async_opd.cluster.remote import Remote
from async_opd.config.sections.reliability import SupervisionConfig
from async_opd.config.sections.teachers import HealthConfig
from async_opd.core.batch import Batch, unpack
from async_opd.core.reports import StageReport
from async_opd.core.samples import Prompt, Rollout, Sample, VersionSpan
from async_opd.core.scores import SampledLogprobs
from async_opd.core.stages import SamplingSpec
from async_opd.processes.members import MemberSet, Policy
from benchmarks.local_ray import on_local_ray
from teachers.balancer import Balancer
from teachers.pool import TeacherPool
from teachers.replica_slots import ReplicaSlots

AT_ONCE = 32
TOKENS_PER_S = 20_000
"""Speed of a replica: slow enough that two cores carry four of them and Ray beside."""
SHORT, LONG = (64, 512), (2048, 8192)
"""Tokens of short and long requests; one in five is long."""


class Engine:
    """A replica that only takes time; knows how many tokens it has served."""

    def __init__(self) -> None:
        self._free = asyncio.Lock()
        self._tokens = 0

    async def ready(self) -> int:
        """One worker."""
        return 1

    async def score(self, batch: Batch) -> Batch:
        """Scores all 0, after the time of the tokens."""
        tokens = sum(header.tokens for header in batch.headers)
        async with self._free:
            await asyncio.sleep(tokens / TOKENS_PER_S)
        self._tokens += tokens
        return Batch.pack(
            Sample(rollout, SampledLogprobs(np.zeros(len(rollout.response_ids), np.float32)))
            for rollout in unpack(Rollout, [batch])
        )

    async def generate(self, prompts: Sequence[Prompt], sampling: SamplingSpec) -> list[Rollout]:
        """It has nothing to say."""
        return []

    async def report(self) -> StageReport:
        """Tokens served since the start."""
        return StageReport(counters={"tokens": float(self._tokens)})


def request(index: int, tokens: int) -> Batch:
    """One rollout of so many tokens, 16 of them its prompt's."""
    response = np.zeros(tokens - 16, dtype=np.int32)
    logprobs = np.zeros(len(response), dtype=np.float32)
    prompt = Prompt(f"p{index}", "s", "t", np.zeros(16, dtype=np.int32))
    span = VersionSpan(0, 0, len(response))
    return Batch.pack([Rollout.plain(f"p{index}/0", prompt, response, logprobs, (span,), "stop")])


def mixed(seed: int, count: int) -> list[Batch]:
    """Short requests with long ones among them."""
    random_ = random.Random(seed)
    sizes = [random_.randint(*(LONG if random_.random() < 0.2 else SHORT)) for _ in range(count)]
    return [request(index, tokens) for index, tokens in enumerate(sizes)]


async def decisions_per_s(replicas: int, count: int) -> float:
    """Places taken (and as many given back) per second."""
    named = {f"engine/{index}": index for index in range(replicas)}
    policy = Policy[int](supervision=SupervisionConfig())
    balancer = Balancer(MemberSet("teacher t", named, policy), AT_ONCE)
    random_ = random.Random(0)
    sizes = [random_.randint(*SHORT) for _ in range(1000)]
    held = [await balancer.reserve(sizes[i % 1000]) for i in range(replicas * AT_ONCE // 2)]
    order = [random_.randrange(len(held)) for _ in range(count)]
    started = time.perf_counter()
    for index, slot in enumerate(order):
        balancer.release(held[slot])
        held[slot] = await balancer.reserve(sizes[index % 1000])
    return count / (time.perf_counter() - started)


async def engines(count: int) -> list[Remote]:
    """Replicas in separate processes."""
    remotes = [Remote.create(f"teacher t/{index}", timeout_s=60) for index in range(count)]
    await asyncio.gather(*(r.build("benchmarks.balancer:Engine", (), 60) for r in remotes))
    return remotes


async def served(remotes: list[Remote], work: list[Batch], kill_at: int | None) -> dict[str, Any]:
    """All requests through a pool, ``AT_ONCE`` at a time; kills a replica before one of them."""
    pool = TeacherPool(
        ReplicaSlots("t", [TeacherProxy(remote) for remote in remotes], HealthConfig())
    )
    mending = asyncio.create_task(pool.slots.members.run())
    gate = asyncio.Semaphore(AT_ONCE)
    by_replica: Counter[int] = Counter()

    async def one(index: int, batch: Batch) -> bool:
        async with gate:
            if index == kill_at:
                remotes[0].kill()
            scored = await pool.score(batch)
            return len(scored.samples) == 1 and not scored.lost

    started = time.perf_counter()
    done = await asyncio.gather(*(one(index, batch) for index, batch in enumerate(work)))
    seconds = time.perf_counter() - started
    mending.cancel()
    for index, remote in enumerate(remotes):
        if kill_at is None:
            by_replica[index] = int((await remote.call("report")).counters["tokens"])
        remote.kill()
    tokens = list(by_replica.values())
    imbalance = max(tokens) / statistics.mean(tokens) if tokens else 0.0
    return {"ok": sum(done), "seconds": seconds, "imbalance": imbalance}


async def measure(sizes: argparse.Namespace) -> dict[str, float]:
    """Medians over the repeats, each with other requests; the least of what must never fail."""
    repeats, replicas, requests = range(sizes.repeats), sizes.replicas, sizes.requests
    decisions = [await decisions_per_s(replicas, sizes.decisions) for _ in repeats]
    many = [await decisions_per_s(1024, sizes.decisions) for _ in repeats]
    killed, healthy, even = [], [], []
    for seed in repeats:
        work = mixed(seed, requests)
        killed.append(await served(await engines(replicas), work, kill_at=requests // 2))
        healthy.append(await served(await engines(replicas - 1), work, kill_at=None))
        even.append(await served(await engines(replicas), work, kill_at=None))
        print({"killed": killed[-1], "fewer": healthy[-1], "even": even[-1]}, flush=True)
    ratios = [one["seconds"] / other["seconds"] for one, other in zip(killed, healthy, strict=True)]
    return {
        "decisions_per_s": round(statistics.median(decisions)),
        "decisions_per_s_1024_replicas": round(statistics.median(many)),
        "killed_ok": min(run["ok"] for run in killed),
        "killed_total": requests,
        "finish_ratio": round(statistics.median(ratios), 3),
        "imbalance": round(statistics.median(run["imbalance"] for run in even), 3),
    }


def main() -> None:
    """Measures on a local Ray cluster."""
    parser = argparse.ArgumentParser(description=__doc__)
    for name, value in (("repeats", 3), ("requests", 400), ("replicas", 4), ("decisions", 100_000)):
        parser.add_argument(f"--{name}", type=int, default=value)
    sizes = parser.parse_args()
    print(json.dumps(on_local_ray(measure(sizes))))


if __name__ == "__main__":
    main()
