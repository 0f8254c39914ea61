"""Is it worth sending a long rollout to its teacher in pieces, before its last token is there?

    whole     last token ──► one request for all rows ──► scores
    pieces    every 256 tokens ──► a request for the rows since then ──► … ──► last piece ──► scores

Pieces read the tokens before them from the teacher's prefix cache, so that each token is prefilled
about once. On a real vLLM with random weights (8 layers, hidden 256, vocabulary 32,000), responses
of 1500 tokens after prompts of 64; the student is a clock: tokens come at an even speed, and
responses begin at even distances. ``idle``: one response at a time, half as many tokens as below.
``busy``: eight at once, at a speed that takes 60 % of the teacher's time, measured first.

``python -m benchmarks.early_scoring`` prints one JSON object last: seconds from the last token to
the last score (median and largest), and the teacher's processor time per token, for both ways;
ratios are pieces over whole.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import statistics
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from async_opd.core.engine_args import engine_env
from async_opd.core.samples import Rollout
from benchmarks.random_model import make_model
from benchmarks.scoring import K, cpu_seconds, make_replica, rollouts

VOCABULARY, PROMPT = 32_000, 64


class Teacher:
    """Scores any rows of a rollout."""

    def __init__(self, replica: Any) -> None:
        self._engine = replica._engine
        self._requests = 0

    async def rows(self, item: Rollout, first: int, last: int) -> None:
        """Response tokens ``first <= i < last``."""
        from vllm import SamplingParams
        from vllm.inputs import TokensPrompt
        from vllm.sampling_params import RequestOutputKind

        from teachers.rows import Wanted

        prompt, wanted_ids = item.prompt.token_ids, item.response_ids[first:last]
        start = len(prompt) - 1 + first
        wanted = Wanted(start, last - first, wanted_ids.tobytes(), 1, K)
        params = SamplingParams(
            max_tokens=1,
            temperature=0.0,
            detokenize=False,
            output_kind=RequestOutputKind.FINAL_ONLY,
            skip_reading_prefix_cache=False,
            extra_args=wanted.arguments(),
        )
        tokens = [*prompt.tolist(), *item.response_ids[: last - 1].tolist()]
        self._requests += 1
        request = TokensPrompt(prompt_token_ids=tokens)
        async for output in self._engine.generate(request, params, f"r{self._requests}"):
            if output.finished and len(output.prompt_token_id_logprobs) != last - first:
                raise RuntimeError(f"rows {first} to {last} of {item.uid} were not scored")


async def respond(teacher: Teacher, item: Rollout, speed: float, begin: float, piece: int) -> float:
    """Lives through one response of ``speed`` tokens/s; seconds from its last token to its scores.

    A piece is sent when its tokens are there and the one before it is scored.
    """
    length, first = len(item.response_ids), 0
    for last in [*range(piece, length, piece), length]:
        await asyncio.sleep(max(0.0, begin + last / speed - time.perf_counter()))
        await teacher.rows(item, first, last)
        first = last
    return time.perf_counter() - (begin + length / speed)


async def many(
    teacher: Teacher, items: Sequence[Rollout], at_once: int, speed: float, piece: int
) -> dict[str, float]:
    """Responses of which ``at_once`` are under way at any time."""
    length = len(items[0].response_ids)
    begin, used = time.perf_counter() + 0.1, cpu_seconds()
    distance = length / speed / at_once
    waits = await asyncio.gather(
        *(respond(teacher, i, speed, begin + n * distance, piece) for n, i in enumerate(items))
    )
    tokens = sum(item.tokens for item in items)
    return {
        "wait_s": statistics.median(waits),
        "max_wait_s": max(waits),
        "cpu_us_per_token": (cpu_seconds() - used) / tokens * 1e6,
    }


async def throughput(teacher: Teacher, items: Sequence[Rollout]) -> float:
    """Tokens per second of responses scored whole and all at once."""
    started = time.perf_counter()
    await asyncio.gather(*(teacher.rows(item, 0, len(item.response_ids)) for item in items))
    return sum(item.tokens for item in items) / (time.perf_counter() - started)


async def measure(arguments: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Both loads, both ways in turn."""
    replica = make_replica(make_model(folder / "model", vocabulary=VOCABULARY), kv_cache_mib=1024)
    length, count = arguments.tokens, arguments.responses

    def fresh(number: int) -> list[Rollout]:
        return rollouts(number, PROMPT, length, VOCABULARY)

    try:
        teacher = Teacher(replica)
        await throughput(teacher, fresh(2))
        top = await throughput(teacher, fresh(count))
        speed = 0.6 * top / arguments.at_once
        loads = {"idle": (1, 4 * speed), "busy": (arguments.at_once, speed)}
        found: dict[str, list[dict[str, float]]] = {}
        for _ in range(arguments.repeats):
            for load, (at_once, pace) in loads.items():
                for way, piece in (("whole", length), ("pieces", arguments.piece)):
                    number = count if load == "busy" else 3
                    run = await many(teacher, fresh(number), at_once, pace, piece)
                    found.setdefault(f"{load}_{way}", []).append(run)
                    print(load, way, {k: round(v, 3) for k, v in run.items()}, flush=True)
    finally:
        await replica.shutdown()
    result = {"whole_tokens_per_s": round(top)}
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
    os.environ.update(engine_env("cpu"))
    with tempfile.TemporaryDirectory() as folder:
        print(json.dumps(asyncio.run(measure(arguments, Path(folder)))))


if __name__ == "__main__":
    main()
