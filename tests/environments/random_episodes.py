"""Random episodes on the real loop, worker, slots, queue and batcher, and what is wrong with them.

    prompts ──► RolloutWorker ──► EpisodePlayer ──turn──► Engine, which keeps what it was asked and
       ▲            │ dies             │                  what it sampled, token by token
       └──lease─────┘                  └──step──► Played environments ──► rollouts, dead letters
                                                                              └──► violations

A seed decides everything: templates of the student and of a teacher, history, bounds, messages,
faults, weight syncs, and when a replica dies. Time is virtual. The oracle knows spans, and nothing
else of how episodes are put together: each sampled token has a log-probability of its own.
"""

from __future__ import annotations

import asyncio
import random
from collections import defaultdict
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import count, pairwise
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np

from async_opd.config.sections.environment import EnvironmentConfig
from async_opd.core.batch import Batch
from async_opd.core.environments import AssistantMessage, Collateral, Message, Opening, Outcome
from async_opd.core.errors import RolloutFault
from async_opd.core.row import Row
from async_opd.core.samples import (
    DeadLetter,
    Group,
    Prompt,
    Rollout,
    Sample,
    TeacherView,
    VersionSpan,
)
from async_opd.core.scores import SampledLogprobs
from async_opd.core.sequence import PROMPT, STUDENT, Int32
from async_opd.core.stages import DEAD, PROMPTS, SCORED, SamplingSpec, rollouts_topic, topics
from async_opd.core.uid import Uid, rollout_uid
from async_opd.environments.episode import EpisodePlayer, Reading
from async_opd.models.chat_template import ChatTemplate
from async_opd.models.tokenizer import Text
from async_opd.models.turns import Turns
from async_opd.queue.message_queue import MessageQueue
from rollouter.rollout_worker import RolloutWorker
from rollouter.slots import Slots
from tests.environments.templates import ADD, ANSWERS, SECRET, Model, random_style
from tests.models.turns.styles import Style
from tests.world.clock import run_virtually, settle
from trainer.batcher import Batcher

TEACHERS = ("same", "other")
BOUND_S = 1e4
"""Virtual seconds after which a world hangs."""
PIECES = (
    *("3", "", "the answer is 42 ", "\n\n", "<|im_end|>\n<|im_start|>assistant\n", SECRET),
    *("</tool_call>", "<think>", "é✓", "{{ 7 }}", "<|user|>", "x" * 40, '{"a": 1}'),
)


@dataclass(frozen=True)
class Asked:
    """A turn as the engine has sampled it; ``marks`` are the log-probabilities of its tokens."""

    context: Int32
    ids: Int32
    marks: tuple[float, ...]
    versions: tuple[int, ...]


@dataclass
class Played:
    """An environment at random."""

    world: World
    pool: Pool
    of: str = ""

    async def reset(self, row: Row, seed: int) -> Opening:
        self.world.seeds[row.uid].add(seed)
        await self._works()
        text = self.world.text() if self.world.chance.random() < 0.5 else ""
        return Opening(tools=(ADD,) if self.world.tools else (), text=text)

    async def step(self, message: AssistantMessage) -> Outcome:
        await self._works()
        world = self.world
        unknown = sum(call.name != "add" for call in message.calls)
        calls = len(message.calls) + len(message.malformed)
        ends = 0.1 if calls or not world.tools else 0.4
        role: Message = (
            {"role": "tool", "name": "add"} if calls and world.tools else {"role": "user"}
        )
        new = tuple(
            {**role, "content": world.text()} for _ in range(calls if "name" in role else 1)
        )
        return Outcome(new, world.chance.random() < ends, unknown, 0.01)

    async def reward(self) -> float | None:
        await self._works(0.1)
        return self.world.chance.random()

    async def close(self) -> None:
        self.pool.opened.discard(id(self))
        await self.world.wait()

    async def _works(self, share: float = 1.0) -> None:
        await self.world.wait()
        found = self.world.chance.random() / share
        if found < self.world.faults:
            raise RolloutFault("environment", "it raised")
        if found < 2 * self.world.faults:
            self.pool.collateral += 1
            raise Collateral("another one hung")


class Pool:
    """Where they are; ``opened`` and not closed."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.episodes = self.collateral = 0
        self.opened: set[int] = set()
        self._kept: list[Played] = []  # an id is that of one

    async def open(self) -> Played:
        await self.world.wait()
        made = Played(self.world, self)
        self._kept.append(made)
        self.opened.add(id(made))
        self.episodes += 1
        return made

    def close(self) -> None: ...


class Line:
    """A replica's calls of the queue. Those under way go on when it dies, and no other begins."""

    def __init__(self, queue: MessageQueue) -> None:
        self._queue, self.dead = queue, False

    def __getattr__(self, name: str) -> Any:
        async def call(*args: Any, **named: Any) -> Any:
            if self.dead:
                await asyncio.Event().wait()
            asked = asyncio.ensure_future(getattr(self._queue, name)(*args, **named))
            asked.add_done_callback(lambda done: done.cancelled() or done.exception())
            return await asyncio.shield(asked)

        return call


class Replica:
    """The real worker, slots and player, over an engine that samples at random."""

    def __init__(self, world: World, name: str) -> None:
        self.name, self.world = name, world
        self.line: Any = Line(world.queue)
        self.pool = world.pool()
        self.slots, self.room = Slots(world.slots), Slots(world.concurrency, world.n)
        self.player = EpisodePlayer(
            world.config, self.pool, world.model.text, *world.readings, world.longest, world.seed
        )
        self.worker = RolloutWorker(name, self.line, self.room, self._roll)
        self.work = asyncio.create_task(self.worker.run())
        self.work.add_done_callback(self._ended)

    async def _roll(self, prompt: Prompt, uid: Uid) -> Rollout:
        world = self.world
        return await self.player.play(prompt, uid, world.sampling, self._turn, self.slots.reserve)

    async def _turn(self, prompt: Prompt, uid: Uid, sampling: SamplingSpec, turn: int) -> Rollout:
        world, chance = self.world, self.world.chance
        if chance.random() < world.faults / 2:
            raise RolloutFault("student", f"the engine refuses {uid}")
        if self.slots.running > world.slots:
            world.wrong.append(f"{self.slots.running} turns are sampled at once")
        ids, cut = world.model.turn(chance, sampling.max_tokens)
        if len(prompt.token_ids) + len(ids) > world.longest:
            world.wrong.append(f"{uid} is longer than the engine computes")
        marks, versions = [], []
        for at in range(len(ids)):
            if not at or chance.random() < 0.2:
                await world.wait()
            world.sampled += 1
            marks.append(-float(world.sampled))
            versions.append(world.version)
        if marks:
            asked = Asked(prompt.token_ids.copy(), ids, tuple(marks), tuple(versions))
            world.asked[marks[0]] = asked
        await world.wait()
        starts = [at for at in range(len(ids)) if not at or versions[at] != versions[at - 1]]
        spans = tuple(VersionSpan(versions[a], a, b) for a, b in pairwise([*starts, len(ids)]))
        logprobs = np.array(marks, np.float32)
        end: Any = "length" if cut else "stop"
        return Rollout.plain(uid, prompt, ids, logprobs, spans if len(ids) else (), end)

    def _ended(self, work: asyncio.Task[None]) -> None:
        if not work.cancelled() and (error := work.exception()) is not None:
            self.world.wrong.append(f"{self.name} has ended: {error!r}")
            self.world.over.set()

    async def die(self) -> None:
        """Whatever it does: nothing that it has not put into the queue is there any more."""
        self.line.dead = True
        self.work.cancel()
        await asyncio.wait({self.work})
        self.pool.close()


class World:
    """All that a seed decides; ``wrong`` are facts that do not hold."""

    bound_s, moment_s = BOUND_S, 1.0
    answers = ANSWERS
    """The turns that the student samples, as messages."""

    def __init__(self, seed: int) -> None:
        self.seed, self.chance = seed, random.Random(seed)
        some = self.chance.choice
        self.tools = self.chance.random() < 0.7
        self.history: Any = some(["append", "template", "refuse"])
        self.n, self.slots, self.concurrency = some([1, 2, 4]), some([1, 2, 5]), some([2, 6])
        self.groups = -(-some([4, 8, 12]) // self.n)
        self.longest = some([400, 1500, 6000])
        self.sampling = SamplingSpec(some([8, 120, 300, 300]), 1.0, 1.0, self.n)
        self.config = EnvironmentConfig(
            kind="class",
            factory="none:none",
            max_turns=some([1, 4, 16]),
            max_tokens=some([None, None, 60, 400]),
            max_observation_tokens=some([4, 30, 2048]),
            history=self.history,
            on_bad_call=some(["message", "message", "message", "end"]),
        )
        self.faults = some([0.0, 0.01, 0.05])
        self.deaths, self.syncs = some([0, 0, 1, 3]), some([0, 1, 8])
        self.version = self.sampled = 0
        self.wrong: list[str] = []
        self.asked: dict[float, Asked] = {}
        self.seeds: defaultdict[str, set[int]] = defaultdict(set)
        self.outcomes: dict[Uid, Rollout | DeadLetter] = {}

    def models(self, folder: Path) -> None:
        """The student's model, and how the teachers read it. ValueError: ``check`` refuses one."""
        self.models_of(random_style(self.chance), random_style(self.chance), folder)

    def models_of(self, style: Style, other: Style, folder: Path) -> None:
        """Those of two templates."""
        folder.mkdir()
        text = replace(style, special=(*style.special, SECRET)).text(folder / "student")
        other.text(folder / "other")
        chat = ChatTemplate(folder / "other", system=self.chance.choice([None, "Be short."]))
        own, seen = Turns(text, self.history), Turns(Text(folder / "student", chat=chat))
        if (fault := own.fault(self.tools) or seen.fault(self.tools)) is not None:
            raise ValueError(fault[0])
        self.model = Model.of(text, own, folder / "student", self.tools, self.answers)
        reads = Reading(seen, lambda row: f"You are asked: {row.prompt}")
        self.readings = Reading(own, lambda row: row.prompt), {"other": reads}

    def pool(self) -> Any:
        """A replica's environments."""
        return Pool(self)

    def text(self) -> str:
        """A message's text."""
        return "".join(self.chance.choices(PIECES, k=self.chance.choice([1, 1, 2, 3, 9])))

    async def wait(self) -> None:
        """A moment, or several; sometimes none."""
        if (moment := self.chance.random()) < 0.8:
            await asyncio.sleep(moment * self.moment_s)

    async def run(self) -> None:
        """To the end of all prompts."""
        self.queue = MessageQueue(topics(TEACHERS), 512, 1 << 26, BOUND_S, kept=(PROMPTS,))
        queue: Any = self.queue
        self.batcher = Batcher(queue, batch_size=1)
        self.over = asyncio.Event()
        self.replicas = [Replica(self, f"student/{at}") for at in range(self.chance.choice([1, 2]))]
        self.gone: list[Replica] = []
        prompts = [self._prompt(number) for number in range(self.groups)]
        self.uids = {rollout_uid(p.uid, m) for p in prompts for m in range(self.n)}
        others = [
            self._sync(),
            self._die(),
            self._bury(),
            self._train(),
            *map(self._score, TEACHERS),
        ]
        tasks = [asyncio.create_task(one) for one in others]
        try:
            async with asyncio.timeout(self.bound_s):
                groups = [Group(prompt, (*range(self.n),)) for prompt in prompts]
                await self.queue.put(PROMPTS, Batch.pack(groups))
                await self.over.wait()
                if not self.wrong:
                    await self._idle()
        except TimeoutError:
            missing = self.uids - self.outcomes.keys()
            self.wrong.append(f"it hangs: {len(missing)} of {len(self.uids)} have not come")
        finally:
            self.batcher.close()
            for replica in self.replicas:
                await replica.worker.stop()
                replica.pool.close()
            for task in tasks:
                task.cancel()
            found = await asyncio.gather(*tasks, return_exceptions=True)
        self.wrong += [f"{one!r}" for one in found if isinstance(one, Exception)]

    def _prompt(self, number: int) -> Prompt:
        teacher = self.chance.choice(TEACHERS)
        prompt: Any = f"how much? {self.text()}"
        if self.chance.random() < 0.3:
            prompt = [{"role": "user", "content": prompt}]
        row = Row(f"data:{number}", "data", prompt, None, {})
        return Prompt(Uid(f"p{number}"), "data", teacher, np.zeros(3, np.int32), row)

    async def _score(self, teacher: str) -> None:
        topic, done = rollouts_topic(teacher), None
        while True:
            lease = await self.queue.get(topic, 4, ack=done)
            rollouts = lease.items(Rollout)
            scored = (
                Sample(r, SampledLogprobs(np.zeros_like(r.rollout_logprobs))) for r in rollouts
            )
            await self.queue.put(SCORED, Batch.pack(scored))
            done = lease.id

    async def _train(self) -> None:
        while True:
            for sample in (await self.batcher.take(0)).samples:
                self._settle(sample.rollout.uid, sample.rollout)
            await self.batcher.done()

    async def _bury(self) -> None:
        """A dead letter counts unless a copy of its rollout is trained, as in the pipeline."""
        done = None
        while True:
            lease = await self.queue.get(DEAD, 4, ack=done)
            for letter in lease.items(DeadLetter):
                uid = letter.header.uid
                if uid not in self.outcomes and await self.batcher.drop(uid):
                    self._settle(uid, letter)
            done = lease.id

    def _settle(self, uid: Uid, outcome: Rollout | DeadLetter) -> None:
        if uid in self.outcomes or uid not in self.uids:
            self.wrong.append(f"{uid} has come twice, or was never admitted")
        self.outcomes[uid] = outcome
        if self.uids == self.outcomes.keys():
            self.over.set()

    async def _sync(self) -> None:
        for _ in range(self.syncs):
            await asyncio.sleep(self.chance.uniform(0, 8 * self.moment_s))
            self.version += 1

    async def _die(self) -> None:
        """A replica dies, at any turn of the event loop; another one takes its place."""
        for number in range(self.deaths):
            await asyncio.sleep(self.chance.uniform(0, 20 * self.moment_s))
            await settle(self.chance.randint(0, 9))
            place = self.chance.randrange(len(self.replicas))
            dead = self.replicas[place]
            await dead.die()
            self.gone.append(dead)
            await self.queue.release(PROMPTS, dead.name)
            self.replicas[place] = Replica(self, f"{dead.name}#{number}")

    async def _idle(self) -> None:
        """Waits until no worker has a group: copies of rollouts that have come are sampled, too."""
        while (prompts := (await self.queue.stats())[PROMPTS]).ready or prompts.leased:
            await self.wait()
        for replica in (*self.replicas, *self.gone):
            if replica.pool.opened:
                self.wrong.append(
                    f"{len(replica.pool.opened)} environments of {replica.name} are open"
                )
            if (held := replica.slots.running, replica.room.running) != (0, 0):
                self.wrong.append(f"{held} slots of {replica.name} are in use")


# ── the oracle ─────────────────────────────────────────────────────────────────────────────────


def violations(world: World) -> Iterator[str]:
    """Every wrong fact of a world that has run."""
    yield from world.wrong
    for uid, outcome in world.outcomes.items():
        if isinstance(outcome, Rollout):
            yield from (f"{uid}: {one}" for one in _of_rollout(world, outcome))
        elif not outcome.reason or outcome.stage not in ("environment", "student", "prompt"):
            yield f"{uid} is a dead letter of {outcome.stage}: {outcome.reason!r}"
        elif "sampled elsewhere" in outcome.reason or "without its row" in outcome.reason:
            yield outcome.reason
    for row, seeds in world.seeds.items():
        if len(seeds) > 1:
            yield f"{row} has begun with seeds {seeds}"


def _of_rollout(world: World, rollout: Rollout) -> Iterator[str]:
    marks = iter(rollout.rollout_logprobs.tolist())
    versions = [v.version for v in rollout.version_spans for _ in range(v.start, v.end)]
    at = 0
    for context, ids in _turns(rollout):
        found = tuple(next(marks) for _ in ids)
        asked = world.asked.get(found[0])
        if asked is None or asked.marks != found or not np.array_equal(asked.ids, ids):
            yield f"turn {ids} is not one that was sampled"
        elif not np.array_equal(asked.context, context):
            yield f"turn {ids} was sampled after {asked.context}, and stands after {context}"
        elif tuple(versions[at : at + len(ids)]) != asked.versions:
            yield f"versions {versions} where the engine had {asked.versions}"
        at += len(ids)
    if next(marks, None) is not None:
        yield "more log-probabilities than sampled tokens"
    yield from _of_context(world, rollout.token_ids, rollout)
    facts = rollout.episode
    sampled = len(rollout.rollout_logprobs)
    if facts is None or facts.turns > world.config.max_turns:
        yield f"facts {facts}"
    if sampled > (world.config.max_tokens or sampled):
        yield f"{sampled} sampled tokens"
    if world.history == "append" and len(rollout.segments) > 1:
        yield f"segments {rollout.segments}"
    reads_others = rollout.prompt.teacher in world.readings[1]
    if reads_others != (rollout.view is not None):
        yield f"a teacher's view: {rollout.view}"
    if rollout.view is not None:
        yield from _of_context(world, rollout.view.token_ids, rollout.view)
        if [*map(bytes, _sampled(rollout.view))] != [*map(bytes, _sampled(rollout))]:
            yield "the teacher reads other sampled tokens"


def _of_context(world: World, ids: Int32, seen: Rollout | TeacherView) -> Iterator[str]:
    for span in seen.spans:
        if span.origin != STUDENT and world.model.secret in ids[span.start : span.end]:
            yield f"a message's special token is one in {span}"


def _sampled(seen: Rollout | TeacherView) -> Iterator[Int32]:
    return (seen.token_ids[s.start : s.end] for s in seen.spans if s.origin == STUDENT)


def _turns(rollout: Rollout) -> Iterator[tuple[Int32, Int32]]:
    """The tokens before each sampled span in its context, and its own."""
    ids, begin = rollout.token_ids, 0
    for span in rollout.spans:
        if span.origin == PROMPT:
            begin = span.start
        if span.origin == STUDENT:
            yield ids[begin : span.start], ids[span.start : span.end]


def lived(seed: int) -> World:
    """The world of a seed, at its end. Templates that ``check`` refuses are drawn again."""
    world = World(seed)
    with TemporaryDirectory() as folder:
        for number in count():
            with suppress(ValueError):
                world.models(Path(folder) / str(number))
                break
        run_virtually(world.run())
    return world
