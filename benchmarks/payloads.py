"""Processor time of scorer and queue a sample, with its scores by value and by reference.

    this process ──rollouts──► queue ──► scorer ──► teacher ──► scorer ──► queue ──► this process
                                                       └── by reference: store of the node ──► ┘

The stages are the run's own; the teacher answers with hidden states of a given size at once.
``python -m benchmarks.payloads`` prints one JSON object last: milliseconds of processor time a
sample of each process, without what it uses when idle, bytes of a message for each sample, and
ratios of reference over value.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import pickle
import time
from typing import Any

import numpy as np

from async_opd.cluster.payloads.stores import NodeStores
from async_opd.cluster.proxies import QueueProxy, TeacherProxy
from async_opd.cluster.remote import Remote
from async_opd.core.batch import Batch, unpack
from async_opd.core.samples import Prompt, Rollout, Sample, VersionSpan
from async_opd.core.scores import HiddenStates
from async_opd.core.stages import SCORED, rollouts_topic, topics
from async_opd.core.uid import Uid
from async_opd.queue.payloads import read
from async_opd.queue.sizes import Payload, sample_bytes
from benchmarks.cpu_costs import cpu_s
from benchmarks.local_ray import on_local_ray

HIDDEN = 5120
"""Width of the hidden states: that of a model of 32 billion parameters."""
BATCH = 16
"""Rollouts put at once, and the most of a call and of a lease: fewer if they are large."""
IDLE_S = 5.0
"""Seconds in which the processes only wait: they use time for that which belongs to no sample."""
LEAST_S = 1e-4
"""Processor time that differs from the time without samples."""
TEACHER = "t"
BOUND_S = 120.0


class Teacher:
    """Answers at once, with states of zeros."""

    async def score(self, batch: Batch) -> Batch:
        """The samples of the batch."""
        return Batch.pack(
            Sample(
                one, HiddenStates(np.zeros((len(one.response_ids), HIDDEN), np.uint16), "bfloat16")
            )
            for one in unpack(Rollout, [batch])
        )


def rollout(uid: str, tokens: int) -> Rollout:
    """A rollout with so many response tokens."""
    ids = np.arange(tokens, dtype=np.int32)
    logprobs = np.full(tokens, -1, np.float32)
    prompt = Prompt(Uid(uid), "s", TEACHER, ids[:64])
    return Rollout.plain(
        Uid(f"{uid}/0"), prompt, ids, logprobs, (VersionSpan(0, 0, tokens),), "stop"
    )


async def _started(name: str, path: str, *args: Any) -> Remote:
    remote = Remote.create(name, timeout_s=BOUND_S, env={"PYTHONPATH": "."})
    await remote.build(path, args, BOUND_S)
    return remote


async def _seconds(remotes: dict[str, Remote]) -> dict[str, float]:
    """Processor seconds of each process so far."""
    return {name: cpu_s([await remote.pid(BOUND_S)]) for name, remote in remotes.items()}


async def through(mib: float, samples: int, by_reference: bool) -> dict[str, float]:
    """Milliseconds a sample of each process, and the bytes of a message with one of them."""
    stores = NodeStores("benchmark", {}, 600, BOUND_S, BOUND_S)
    bounds = (4096, 4 << 30, 600.0, None, (), 64 << 20, stores)
    queue_remote = await _started(
        "queue", "async_opd.queue.message_queue:MessageQueue", topics([TEACHER]), *bounds
    )
    queue = QueueProxy(queue_remote)
    made = ("benchmarks.payloads:Teacher", ())
    if by_reference:
        made = ("async_opd.cluster.payloads.storing:storing", (*made, queue, TEACHER, 0))  # type: ignore[assignment]
    teacher = await _started("teacher", made[0], *made[1])
    payload = Payload(TEACHER, "hidden", 8, sample_bytes("hidden", 0, HIDDEN, 2))
    given = ({TEACHER: [TeacherProxy(teacher)]}, queue, {TEACHER: BATCH})
    others = (None, None, None, "", None, 1, {TEACHER: payload.call_tokens(by_reference)})
    scorer = await _started("scorer", "teachers.stage:ScorerStage", *given, *others)
    remotes = {"queue": queue_remote, "scorer": scorer, "teacher": teacher}
    tokens = int(mib * (1 << 20) / (2 * HIDDEN))
    work = asyncio.ensure_future(scorer.call("run", timeout_s=float("inf")))
    message = 0.0

    async def pass_through(count: int) -> None:
        nonlocal message
        made = [rollout(f"p{index}", tokens) for index in range(BATCH)]
        for batch in Batch.packed(made * (count // BATCH)):
            await queue.put(rollouts_topic(TEACHER), batch)
        done, left = None, count // BATCH * BATCH
        while left:
            lease = await queue.get(SCORED, BATCH, ack=done)
            message = message or len(pickle.dumps(lease)) / len(lease)
            unpack(Sample, await read(queue, SCORED, lease.batches))
            done, left = lease.id, left - len(lease)
        await queue.ack(SCORED, done or 0)

    await pass_through(BATCH)
    idle = await _seconds(remotes)
    await asyncio.sleep(IDLE_S)
    before, started = await _seconds(remotes), time.perf_counter()
    await pass_through(samples)
    seconds, after = time.perf_counter() - started, await _seconds(remotes)
    work.cancel()
    for remote in remotes.values():
        remote.kill()
    found = {}
    for name in remotes:
        without_work = (before[name] - idle[name]) / IDLE_S * seconds
        used = max(after[name] - before[name] - without_work, LEAST_S)
        found[f"{name}_ms"] = round(1e3 * used / samples, 3)
    return found | {"message_bytes": round(message), "wall_ms": round(1e3 * seconds / samples, 2)}


async def measure(sizes: list[float], samples: int) -> dict[str, Any]:
    """Each size both ways."""
    found: dict[str, Any] = {}
    for mib in sizes:
        value = await through(mib, samples, False)
        reference = await through(mib, samples, True)
        cpu = [one["queue_ms"] + one["scorer_ms"] for one in (reference, value)]
        found[f"{mib:g} MiB"] = {
            "value": value,
            "reference": reference,
            "cpu_ratio": round(cpu[0] / cpu[1], 3),
            "bytes_ratio": round(reference["message_bytes"] / value["message_bytes"], 5),
        }
        print(f"{mib:g} MiB", json.dumps(found[f"{mib:g} MiB"]), flush=True)
    return found


def main() -> None:
    """Measures on a local Ray cluster."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--mib", type=float, nargs="+", default=[0.25, 1.0, 4.0, 80.0])
    parser.add_argument("--samples", type=int, default=64)
    given = parser.parse_args()
    print(json.dumps(on_local_ray(measure(given.mib, given.samples))))


if __name__ == "__main__":
    main()
