"""What a long rollout gains by going to its teacher in pieces, before its last token is there.

    whole     last token ──► topic rollouts ──► all rows ──► topic scored
    pieces    every 256 tokens ──► topic early ──► their rows … last token ──► the rest ──► scored

The real scoring stage (``early_tokens``) and a real vLLM with random weights (8 layers, hidden 256,
vocabulary 32,000), the queue in this process; responses of 1500 tokens after prompts of 64. The
student is a clock: tokens come at an even speed, and responses begin at even distances. ``idle``:
one response at a time, half as many tokens as below. ``busy``: eight at once, at a speed that takes
60 % of the teacher's time, measured first.

``python -m benchmarks.early_scoring`` prints one JSON object last: seconds from the last token to
the sample in the queue (median and largest), and processor time per token, for both ways; ratios
are pieces over whole; ``early_used`` is the share of rows ahead that was of use.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import tempfile
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from async_opd.core.batch import Batch
from async_opd.core.queue import MessageQueue
from async_opd.core.samples import Piece, Rollout
from async_opd.core.stages import SCORED, early_topic, rollouts_topic, topics
from benchmarks.random_model import make_model
from benchmarks.scoring import cpu_seconds, load_vllm, make_replica, rollouts
from teachers.scorer import ScorerStage

VOCABULARY, PROMPT = 32_000, 64


class Scorer:
    """The scoring stage of one teacher, from topic to topic."""

    def __init__(self, replica: Any) -> None:
        self._queue = MessageQueue(topics(["s"], ["s"]), 4096, 1 << 30, 600.0)
        self._stage = ScorerStage({"s": [replica]}, self._queue, {"s": 64}, early=["s"])
        self._scored: dict[str, asyncio.Future[None]] = {}

    async def early(self, item: Rollout, start: int, end: int) -> None:
        """Response tokens ``start <= i < end`` go ahead."""
        prompt = item.prompt.token_ids[: None if start == 0 else 0]
        piece = Piece(item.uid, "s", start, prompt, item.response_ids[start:end])
        await self._queue.put(early_topic("s"), Batch.pack([piece]))

    async def score(self, item: Rollout) -> None:
        """Returns when the sample is in the queue."""
        scored = self._scored[item.uid] = asyncio.get_running_loop().create_future()
        await self._queue.put(rollouts_topic("s"), Batch.pack([item]))
        await scored

    async def used(self) -> float:
        """Share of the rows ahead that was of use."""
        gauges = (await self._stage.report())["s"].gauges
        return gauges["early_used"] / gauges["early_rows"]

    async def _collect(self) -> None:
        done: int | None = None
        while True:
            lease = await self._queue.get(SCORED, 64, ack=done)
            for header in (header for batch in lease.batches for header in batch.headers):
                self._scored.pop(header.uid).set_result(None)
            done = lease.id

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """While it works; raises what ends it."""
        async with asyncio.TaskGroup() as group:
            group.create_task(self._stage.run())
            collecting = group.create_task(self._collect())
            yield
            collecting.cancel()
            await self._stage.shutdown()


async def respond(scorer: Scorer, item: Rollout, speed: float, begin: float, piece: int) -> float:
    """Lives through one response of ``speed`` tokens/s; seconds from its last token to its sample.

    A piece is sent when its tokens are there.
    """
    length, start = len(item.response_ids), 0

    async def reach(tokens: int) -> None:
        await asyncio.sleep(max(0.0, begin + tokens / speed - time.perf_counter()))

    for end in range(piece, length, piece) if piece else ():
        await reach(end)
        await scorer.early(item, start, end)
        start = end
    await reach(length)
    await scorer.score(item)
    return time.perf_counter() - (begin + length / speed)


async def many(
    scorer: Scorer, items: Sequence[Rollout], at_once: int, speed: float, piece: int
) -> dict[str, float]:
    """Responses of which ``at_once`` are under way at any time."""
    length = len(items[0].response_ids)
    begin, used = time.perf_counter() + 0.1, cpu_seconds()
    distance = length / speed / at_once
    waits = await asyncio.gather(
        *(respond(scorer, i, speed, begin + n * distance, piece) for n, i in enumerate(items))
    )
    tokens = sum(item.tokens for item in items)
    return {
        "wait_s": statistics.median(waits),
        "max_wait_s": max(waits),
        "cpu_us_per_token": (cpu_seconds() - used) / tokens * 1e6,
    }


async def throughput(scorer: Scorer, items: Sequence[Rollout]) -> float:
    """Tokens per second of responses scored whole and all at once."""
    started = time.perf_counter()
    await asyncio.gather(*(scorer.score(item) for item in items))
    return sum(item.tokens for item in items) / (time.perf_counter() - started)


async def measure(arguments: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Both loads, both ways in turn."""
    replica = make_replica(make_model(folder / "model", vocabulary=VOCABULARY), kv_cache_mib=1024)
    length, count = arguments.tokens, arguments.responses

    def fresh(number: int) -> list[Rollout]:
        return rollouts(number, PROMPT, length, VOCABULARY)

    scorer = Scorer(replica)
    found: dict[str, list[dict[str, float]]] = {}
    try:
        async with scorer.running():
            await throughput(scorer, fresh(2))
            top = await throughput(scorer, fresh(count))
            speed = 0.6 * top / arguments.at_once
            loads = {"idle": (1, 4 * speed), "busy": (arguments.at_once, speed)}
            for _ in range(arguments.repeats):
                for load, (at_once, pace) in loads.items():
                    for way, piece in (("whole", 0), ("pieces", arguments.piece)):
                        number = count if load == "busy" else 3
                        run = await many(scorer, fresh(number), at_once, pace, piece)
                        found.setdefault(f"{load}_{way}", []).append(run)
                        print(load, way, {k: round(v, 3) for k, v in run.items()}, flush=True)
            used = await scorer.used()
    finally:
        await replica.shutdown()
    result = {"whole_tokens_per_s": round(top), "early_used": round(used, 3)}
    for name, runs in found.items():
        for key in runs[0]:
            result[f"{name}_{key}"] = round(statistics.median(run[key] for run in runs), 3)
    for load in loads:
        for key in ("wait_s", "cpu_us_per_token"):
            ratio = result[f"{load}_pieces_{key}"] / result[f"{load}_whole_{key}"]
            result[f"{load}_{key}_ratio"] = round(ratio, 2)
    return result


def main() -> None:
    """Measures."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokens", type=int, default=1500)
    parser.add_argument("--piece", type=int, default=256)
    parser.add_argument("--responses", type=int, default=16)
    parser.add_argument("--at-once", type=int, default=8)
    parser.add_argument("--repeats", type=int, default=3)
    arguments = parser.parse_args()
    load_vllm()
    with tempfile.TemporaryDirectory() as folder:
        print(json.dumps(asyncio.run(measure(arguments, Path(folder)))))


if __name__ == "__main__":
    main()
