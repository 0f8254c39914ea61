"""Costs of episodes: busy engines, no bias to short ones, rendering; and random ones, judged.

    python -m benchmarks.episodes [--only busy bias render] [--episodes N]
    python -m benchmarks.episodes --property N [--first SEED]

The real loop, worker, slots, queue, batcher and pipeline in virtual time; engines and tools only
take time (``benchmarks.simulated.episodes``). Turns of an episode are 1 to 32 (log-uniform), tokens
of a turn 20 to 63: lengths of factor 100. A tool takes as long as a turn in the mean, log-normal
with sigma 1.

    busy_ratio        running requests of the engines, over those of single turns of the same
                      tokens, with three episodes for each slot; ``busy_by_concurrency`` has others
    turn_bias_mask    mean turns of the trained episodes over those of all admitted, minus 1, of N
                      episodes without draining: s = 0.5, batches of 16, max_version_lag 2.
                      ``ks_p_…``: that the trained ones have the turns that are drawn (KS test)
    turn_bias_requeue  the same where an episode is as long in each try; ``…_redrawn``: where each
                      try has another length. ``requeued_…``: times that one was sampled again
    render_share      seconds of the loop itself over those of the engine at 50 tokens/s, of an
                      episode of 128 turns of 512 tokens; ``us_per_turn``. ``…_view``: a teacher has
                      another template. ``…_template``: each turn begins a segment
    violations        of N random episodes (``tests/environments/random_episodes.py``): tokens that
                      are trained elsewhere than they were sampled, rollouts that are lost or twice

Prints one JSON line last; about three minutes. Exit code 1 with a violation.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import statistics
import sys
import tempfile
import time
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np

from async_opd.config.sections.plan import RolloutPlan, TeacherPlan, TrainPlan
from async_opd.core.batch import Batch
from async_opd.core.reports import StepReport
from async_opd.core.row import Row
from async_opd.core.samples import Group, Header, Prompt, Rollout, VersionSpan
from async_opd.core.stages import PROMPTS, SamplingSpec, rollouts_topic
from async_opd.core.uid import Uid
from async_opd.environments.episode import Reading
from async_opd.models.chat_template import ChatTemplate
from async_opd.models.tokenizer import Text
from async_opd.models.turns import Turns
from async_opd.queue.message_queue import MessageQueue
from async_opd.tools.plan.setting import Lengths, RolloutPoolSpec, Setting, TeacherPoolSpec
from async_opd.waiting.deadline import race
from benchmarks.simulated.episodes import SAMPLING, EpisodeStudent, Shape, Shapes, Tools, player
from rollouter.slots import Slots
from tests.environments.random_episodes import lived, violations
from tests.models.turns.styles import STYLES
from tests.tools.plan.virtual import build, config_of
from tests.world.clock import run_virtually
from tests.world.log import FakeLog
from tests.world.queue import message_queue

TOKEN_S = 0.02
SPEED = RolloutPlan(step_s=TOKEN_S)
SHAPES = Shapes(32, TOKEN_S)
SLOTS = 32
LAG = 2
CASES = (("mask", None, False), ("requeue", LAG, False), ("requeue_redrawn", LAG, True))
PARTS = ("busy", "bias", "render")


class Trained(NamedTuple):
    """The headers of trained episodes, the uids of all prompts that were admitted until then.

    ``requeued``: times that one was sampled again; ``old_tokens`` are staler than ``LAG``.
    """

    headers: list[Header]
    admitted: list[Uid]
    requeued: int
    old_tokens: int


def random_episodes(number: int, first: int) -> dict[str, int]:
    """So many episodes of random worlds; prints what is wrong."""
    counts = {"episodes": 0, "worlds": 0, "violations": 0}
    for seed in count(first):
        if counts["episodes"] >= number:
            return counts | {"next": seed}
        world = lived(seed)
        found = [*violations(world)]
        counts["worlds"] += 1
        counts["episodes"] += len(world.outcomes)
        counts["violations"] += len(found)
        if found:
            print(f"seed {seed}", *found, sep="\n    ", flush=True)
        if counts["worlds"] % 100 == 0:
            print(counts, flush=True)
    raise AssertionError


# ── busy engines ───────────────────────────────────────────────────────────────────────────────


async def busy(text: Text | None, concurrency: int, seconds: float) -> float:
    """The mean share of a replica's slots that sample, after a warm-up of as many seconds."""
    queue = message_queue("t", size=4 * concurrency)
    student = EpisodeStudent("s", queue, SPEED, SHAPES, SLOTS, concurrency, text)

    async def feed() -> None:
        ids = np.zeros(1, np.int32)
        for number in count():
            group = Group(Prompt(Uid(f"p{number}"), "t", "t", ids), (0,))
            await queue.put(PROMPTS, Batch.pack([group]))

    async def drain() -> None:
        done = None
        while True:
            done = (await queue.get(rollouts_topic("t"), 64, ack=done)).id

    others = [asyncio.create_task(one) for one in (feed(), drain(), student.run())]
    await asyncio.sleep(seconds)
    begun = student.request_s
    await asyncio.sleep(seconds)
    share = (student.request_s - begun) / (seconds * SLOTS)
    for task in others:
        task.cancel()
    await asyncio.gather(*others, return_exceptions=True)
    return share


def busy_figures(text: Text, seconds: float) -> dict[str, Any]:
    """See the module."""
    single = run_virtually(busy(None, SLOTS, seconds))
    found = {
        f"{factor:g}": round(run_virtually(busy(text, round(factor * SLOTS), seconds)) / single, 3)
        for factor in (1, 2, 3, 4)
    }
    return {"busy_ratio": found["3"], "busy_by_concurrency": found, "busy_single": round(single, 3)}


# ── turns of trained and admitted episodes ─────────────────────────────────────────────────────


def ks_p(found: Sequence[int], law: Sequence[int]) -> float:
    """The p-value of the Kolmogorov-Smirnov test of two samples; discrete values make it larger."""
    one, other = sorted(found), sorted(law)
    distance = max(
        abs(bisect_right(one, at) / len(one) - bisect_right(other, at) / len(other))
        for at in {*one, *other}
    )
    size = math.sqrt(len(one) * len(other) / (len(one) + len(other)))
    scaled = (size + 0.12 + 0.11 / size) * distance
    terms = (2 * (-1) ** (k - 1) * math.exp(-2 * (k * scaled) ** 2) for k in range(1, 101))
    return min(1.0, max(0.0, sum(terms))) if scaled > 0.2 else 1.0


def trained_early(setting: Setting, text: Text, redraws: bool, most: int) -> Trained:
    """The first ``most`` episodes that a run trains; it would go on."""

    async def run() -> Trained:
        students: list[EpisodeStudent] = []
        slots = setting.rollout.slots

        def make(queue: MessageQueue) -> dict[str, Any]:
            made = EpisodeStudent("s", queue, SPEED, SHAPES, slots, slots, text, redraws)
            students.append(made)
            return {"s": made}

        log: Any = FakeLog()
        clock = asyncio.get_running_loop().time
        config = config_of(setting, {})
        _, pipeline = build(config, setting, 0, clock, log, make_students=make)
        settle, headers, enough = pipeline.run_state.settle, list[Header](), asyncio.Event()
        old = 0

        def settled(report: StepReport) -> None:
            nonlocal old
            since = len(headers) // setting.batch_size - LAG  # a version is a step
            old += sum(one.response_tokens - one.tokens_since(since) for one in report.trained)
            headers.extend(report.trained)
            settle(report)
            if len(headers) >= most:
                enough.set()

        pipeline.run_state.settle = settled  # type: ignore[method-assign]
        running = asyncio.create_task(pipeline.run())
        await race(enough.wait(), running)
        requeued = pipeline.run_state.ledger.counts["requeued"]
        return Trained(headers, [*students[0].tries], requeued, old)

    found: Trained = run_virtually(run())
    return found


def bias_figures(text: Text, episodes: int) -> dict[str, Any]:
    """See the module."""
    size = 16
    setting = Setting(
        steps=2 * episodes // size,
        batch_size=size,
        sync_steps=1,
        staleness_threshold=0.5,
        lengths=Lengths(1, 0, 1),
        prompt_tokens=1,
        rollout=RolloutPoolSpec(1, 1, SPEED, 2 * size, 2 * size, 1),
        teachers=(TeacherPoolSpec("t", 1, 1, TeacherPlan(tokens_per_s=1e6), 32, 1.0),),
        train=TrainPlan(tokens_per_s=1e6),
        ranks=1,
    )
    law = [SHAPES.turns(f"law {number}") for number in range(20_000)]
    figures: dict[str, Any] = {}
    for name, lag, redraws in CASES:
        cased = replace(setting, max_version_lag=lag)
        found = trained_early(cased, text, redraws, episodes)
        turns = [one.turns for one in found.headers]
        admitted = statistics.fmean(map(SHAPES.turns, found.admitted))
        figures |= {
            f"turn_bias_{name}": round(statistics.fmean(turns) / admitted - 1, 4),
            f"ks_p_{name}": round(ks_p(turns, law), 3),
        }
        if lag is None:
            tokens = sum(one.response_tokens for one in found.headers)
            figures["masked_share"] = round(found.old_tokens / tokens, 4)
        else:
            figures[f"requeued_{name}"] = found.requeued
        print({key: value for key, value in figures.items() if name in key}, flush=True)
    return figures


# ── rendering and bookkeeping ──────────────────────────────────────────────────────────────────


def rendering_s(
    text: Text, turns: int, tokens: int, history: Literal["append", "template"], other: Text | None
) -> float:
    """Processor seconds of one episode without its engine and its tools."""
    thought = text.plain("<think>I think</think>") if history == "template" else []
    filler = text.plain("the answer is 42, ")
    body = np.resize(np.array(filler, np.int32), tokens - len(thought) - 1)
    sampled = np.array([*thought, *body, text.response_ends()[0]], np.int32)
    logprobs = np.zeros(tokens, np.float32)
    shape = Shape((tokens,) * turns, (0.0,) * turns)
    engine_s = 0.0

    async def turn(prompt: Prompt, uid: Uid, sampling: SamplingSpec, number: int) -> Rollout:
        nonlocal engine_s
        begun = time.process_time()
        spans = (VersionSpan(0, 0, tokens),)
        found = Rollout.plain(uid, prompt, sampled, logprobs, spans, "stop")
        engine_s += time.process_time() - begun
        return found

    teachers = {} if other is None else {"t": Reading(Turns(other), lambda row: row.prompt)}
    played = player(text, Tools({Uid("p"): shape}), teachers, history=history)
    row = Row("p", "data", "how much?", None, {})
    prompt = Prompt(Uid("p"), "data", "t", np.zeros(1, np.int32), row)
    slots = Slots(1)
    begun = time.process_time()
    asyncio.run(played.play(prompt, Uid("p/0"), SAMPLING, turn, slots.reserve))
    return time.process_time() - begun - engine_s


def render_figures(folder: Path, turns: int) -> dict[str, Any]:
    """See the module."""
    tokens, per_s = 512, 50.0
    text = STYLES["qwen3"].text(folder / "student")
    other = folder / "teacher"
    STYLES["llama"].text(other)
    read = Text(folder / "student", chat=ChatTemplate(other))
    found = {
        "": rendering_s(text, turns, tokens, "append", None),
        "_view": rendering_s(text, turns, tokens, "append", read),
        "_template": rendering_s(text, turns, tokens, "template", None),
    }
    generation_s = turns * tokens / per_s
    shares = {f"render_share{key}": round(s / generation_s, 6) for key, s in found.items()}
    return shares | {f"us_per_turn{key}": round(s / turns * 1e6) for key, s in found.items()}


def main() -> int:
    """See the module."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--only", nargs="+", choices=PARTS, default=PARTS)
    parser.add_argument("--episodes", type=int, default=2000)
    parser.add_argument("--property", type=int, metavar="N")
    parser.add_argument("--first", type=int, default=0, metavar="SEED")
    given = parser.parse_args()
    if given.property:
        counts = random_episodes(given.property, given.first)
        print(json.dumps(counts))
        return int(counts["violations"] > 0)
    figures: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as name:
        text = STYLES["qwen2.5"].text(Path(name) / "plain")
        if "busy" in given.only:
            figures |= busy_figures(text, given.episodes * 0.25)
        if "bias" in given.only:
            figures |= bias_figures(text, given.episodes)
        if "render" in given.only:
            figures |= render_figures(Path(name), min(128, given.episodes))
    print(json.dumps(figures))
    return 0


if __name__ == "__main__":
    sys.exit(main())
