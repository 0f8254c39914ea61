"""The teacher stage against the engine inside of it, on a real vLLM with random weights.

    stage     Batch of rollouts ──TeacherReplica.score──► Batch ──checks──► arrays, as trained
    engine    the same sequences with prompt_logprobs=64; results are dropped as they arrive, before
              the front end makes Python lists of them
    objects   the same, read the ordinary way: one Logprob object per token and candidate
    groups    as stage, four rollouts to a prompt, which is 8 tokens longer: of a prompt that ends
              with a block of the cache, the last row would be in it

All on one engine and in turn; every sequence is a new one, so that none but groups profits from
the prefix cache. Short: 8 layers, hidden 256, vocabulary 32,000, prompts of 64 and responses of 192
tokens. Long: prompts of 512 and responses of 128 at a vocabulary of 131,072.

``python -m benchmarks.scoring`` prints one JSON object last: ratios of medians of tokens per second
(prompt and response), stage over the other; ``cpu_…`` the same per second of processor time of all
processes, which a busy machine changes less; ``bytes_per_token`` of the stage's answer per response
token; ``difference`` the largest one between stage and objects, in nats; ``group_ratio`` groups
over stage, at the long sizes.
"""

from __future__ import annotations

import argparse
import asyncio
import importlib
import itertools
import json
import os
import statistics
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import psutil

from async_opd.config.sections.engine import EngineConfig
from async_opd.core.batch import Batch, unpack
from async_opd.core.samples import Prompt, Rollout, Sample, VersionSpan
from async_opd.models.engine_args import engine_env, engine_kwargs
from benchmarks.random_model import make_model
from teachers.answers import check

K = 64
SEED = itertools.count()


def rollouts(
    count: int, prompt: int, response: int, vocabulary: int, group: int = 1
) -> list[Rollout]:
    """New random ones, ``group`` to a prompt."""
    rng = np.random.default_rng(next(SEED))
    made = []
    for index in range(count):
        ids = rng.integers(0, vocabulary, prompt + response).astype(np.int32)
        uid = f"{rng.integers(1 << 60)}/{index}"
        zeros, span = np.zeros(response, np.float32), VersionSpan(0, 0, response)
        if index % group == 0:
            source = Prompt(uid, "s", "s", ids[:prompt])
        made.append(Rollout.plain(uid, source, ids[prompt:], zeros, (span,), "length"))
    return made


def of_groups(count: int, prompt: int, response: int, vocabulary: int) -> list[Rollout]:
    """Four rollouts to each prompt."""
    return rollouts(count, prompt + 8, response, vocabulary, group=4)


class Way(Protocol):
    """Scores rollouts, and returns log-probabilities [R, K] of each."""

    async def __call__(self, items: Sequence[Rollout]) -> Any: ...


class Ways:
    """The three over one replica."""

    def __init__(self, replica: Any) -> None:
        self._replica = replica
        self.nbytes = 0.0

    async def stage(self, items: Sequence[Rollout]) -> list[Any]:
        """Ours: what replica, pool and trainer do with the arrays."""
        asked = Batch.pack(items)
        batch = await self._replica.score(asked)
        check("teacher t", asked, batch)
        self.nbytes = batch.nbytes / sum(len(item.response_ids) for item in items)
        return [sample.scores.logprobs for sample in unpack(Sample, [batch])]

    groups = stage

    async def engine(self, items: Sequence[Rollout]) -> None:
        """Nothing is read."""
        with dropped():
            await asyncio.gather(*(self._ask(item) for item in items))

    async def objects(self, items: Sequence[Rollout]) -> list[Any]:
        """As vLLM's users read them: a dictionary of Logprob for each position."""
        outputs = await asyncio.gather(*(self._ask(item) for item in items))
        return [_read(o, i) for o, i in zip(outputs, items, strict=True)]

    async def _ask(self, item: Rollout) -> Any:
        from vllm import SamplingParams
        from vllm.inputs import TokensPrompt

        params = SamplingParams(
            max_tokens=1, temperature=0.0, detokenize=False, prompt_logprobs=K, flat_logprobs=False
        )
        tokens = [*item.prompt.token_ids.tolist(), *item.response_ids.tolist()]
        request = TokensPrompt(prompt_token_ids=tokens)
        async for output in self._replica._engine.generate(request, params, f"b{next(SEED)}"):
            if output.finished:
                return output
        raise RuntimeError("no final output")


def _read(output: Any, item: Rollout) -> Any:
    rows = output.prompt_logprobs[-len(item.response_ids) :]
    best = [[entry.logprob for entry in row.values() if entry.rank <= K] for row in rows]
    return np.array([sorted(row, reverse=True)[:K] for row in best], np.float32)


@contextmanager
def dropped() -> Iterator[None]:
    """The front end makes nothing of prompt log-probabilities."""
    from vllm.v1.engine.logprobs import LogprobsProcessor

    whole = LogprobsProcessor._update_prompt_logprobs
    LogprobsProcessor._update_prompt_logprobs = lambda *_: None
    try:
        yield
    finally:
        LogprobsProcessor._update_prompt_logprobs = whole


def cpu_seconds() -> float:
    """Processor time of this process and its children."""
    me = psutil.Process()
    times = [process.cpu_times() for process in (me, *me.children(recursive=True))]
    return sum(used.user + used.system for used in times)


async def timed(way: Way, items: Sequence[Rollout]) -> tuple[float, float]:
    """Tokens per second, and per second of processor time."""
    tokens = sum(item.tokens for item in items)
    started, used = time.perf_counter(), cpu_seconds()
    await way(items)
    return tokens / (time.perf_counter() - started), tokens / (cpu_seconds() - used)


def load_vllm() -> None:
    """For CPUs, and where no frame holds an engine.

    An error that is kept somewhere below keeps the frames of its importers, and what is in them:
    an engine would live until the interpreter ends, and its finalizer then fails.
    """
    os.environ.update(engine_env("cpu"))
    importlib.import_module("teachers.replica")


def make_replica(model: Path, kv_cache_mib: int = 256) -> Any:
    """A teacher that returns its top 64."""
    from teachers.replica import TeacherReplica
    from teachers.spec import TeacherEngineSpec

    engine = EngineConfig(cpu_kv_cache_mib=kv_cache_mib)
    kwargs = engine_kwargs(
        engine, model=str(model), device="cpu", tensor_parallel=1, seed=0, trust_remote_code=False
    )
    kwargs["max_logprobs"] = K + 1
    return TeacherReplica(TeacherEngineSpec("teacher t/0", kwargs, "teacher_topk", K, ()))


async def measure(
    model: Path, sizes: tuple[int, int, int, int], repeats: int, others: Sequence[str]
) -> dict[str, Any]:
    """Medians of the ways in turn, and what else there is to know."""
    replica = make_replica(model)
    try:
        ways = Ways(replica)
        names = ["stage", *others]
        few = rollouts(2, *sizes[1:])
        for name in names:
            await getattr(ways, name)(few)
        found: dict[str, list[tuple[float, float]]] = {name: [] for name in names}
        for _ in range(repeats):
            for name, runs in found.items():
                items = of_groups(*sizes) if name == "groups" else rollouts(*sizes)
                runs.append(await timed(getattr(ways, name), items))
                print(sizes, name, [round(rate) for rate in runs[-1]], flush=True)
        same = rollouts(2, *sizes[1:])
        pairs = zip(await ways.stage(same), await ways.objects(same), strict=True)
        difference = max(float(np.abs(mine - theirs).max()) for mine, theirs in pairs)
    finally:
        await replica.shutdown()
    rates = {
        name: [statistics.median(column) for column in zip(*runs, strict=True)]
        for name, runs in found.items()
    }
    return {"rates": rates, "bytes": ways.nbytes, "difference": difference}


async def compare(arguments: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Both sizes."""
    small = make_model(folder / "small", vocabulary=32_000)
    sizes = (arguments.rollouts, 64, 192, 32_000)
    short = await measure(small, sizes, arguments.repeats, ("engine", "objects"))
    large = make_model(folder / "large", vocabulary=131_072)
    sizes = (arguments.long_rollouts, 512, 128, 131_072)
    long = await measure(large, sizes, arguments.repeats, ("objects", "groups"))
    result: dict[str, Any] = {}
    for name, case, other in (
        ("ratio_to_engine", short, "engine"),
        ("ratio_to_python_objects", short, "objects"),
        ("long_prompt_ratio", long, "objects"),
    ):
        for prefix, index in (("", 0), ("cpu_", 1)):
            mine, theirs = case["rates"]["stage"][index], case["rates"][other][index]
            result[prefix + name] = round(mine / theirs, 2)
    result["group_ratio"] = round(long["rates"]["groups"][0] / long["rates"]["stage"][0], 2)
    for label, case in (("short", short), ("long", long)):
        result |= {f"{label}_{name}_tokens_per_s": round(r[0]) for name, r in case["rates"].items()}
    result["bytes_per_token"] = round(short["bytes"], 1)
    result["difference"] = max(short["difference"], long["difference"])
    return result


def main() -> None:
    """Measures."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--rollouts", type=int, default=32)
    parser.add_argument("--long-rollouts", type=int, default=8)
    arguments = parser.parse_args()
    load_vllm()
    with tempfile.TemporaryDirectory() as folder:
        print(json.dumps(asyncio.run(compare(arguments, Path(folder)))))


if __name__ == "__main__":
    main()
