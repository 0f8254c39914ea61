"""Episodes that take time but mean nothing: the real loop over a decoder and tools that sleep."""

from __future__ import annotations

import asyncio
import math
import random
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any, Literal, NamedTuple

import numpy as np

from async_opd.config.sections.environment import EnvironmentConfig
from async_opd.config.sections.plan import RolloutPlan
from async_opd.core.environments import AssistantMessage, Message, Opening, Outcome
from async_opd.core.row import Row
from async_opd.core.samples import Prompt, Rollout
from async_opd.core.stages import Queue, SamplingSpec
from async_opd.core.uid import Uid
from async_opd.environments.episode import EpisodePlayer, Opens, Reading
from async_opd.models.tokenizer import Text
from async_opd.models.turns import Turns
from async_opd.tools.plan.setting import Lengths
from benchmarks.simulated.replicas import SimulatedStudent
from rollouter.slots import Slots

CONFIG = EnvironmentConfig(kind="class", factory="none:none", max_turns=1000)
SAMPLING = SamplingSpec(1 << 20, 1.0, 1.0, 1)
LONGEST = 1 << 30
LETTER = 70
NEXT: Message = {"role": "user", "content": "and now?"}


class Shape(NamedTuple):
    """An episode's turns: the tokens of each, and the seconds of the tools after it."""

    tokens: tuple[int, ...]
    tool_s: tuple[float, ...]


@dataclass(frozen=True)
class Shapes:
    """Turns 1 to ``most``, tokens of a turn 20 to 63, both log-uniform; tools are log-normal.

    A tool takes the seconds of a turn of 38 tokens in the mean, with ``sigma``.
    """

    most: int
    token_s: float
    sigma: float = 1.0

    def turns(self, key: str) -> int:
        """The turns of the episode of a key, always the same."""
        drawn = math.exp(random.Random(key).uniform(math.log(0.5), math.log(self.most + 0.5)))
        return min(max(round(drawn), 1), self.most)

    def of(self, key: str) -> Shape:
        """The episode of a key, always the same."""
        turns, chance = self.turns(key), random.Random(f"turns of {key}")
        tokens = round(math.exp(chance.uniform(math.log(20), math.log(63))))
        mean = math.log(38 * self.token_s) - self.sigma**2 / 2
        tools = tuple(chance.lognormvariate(mean, self.sigma) for _ in range(turns))
        return Shape((tokens,) * turns, tools)


class Tool:
    """An environment that sleeps, and is done after the turns of its episode's shape."""

    def __init__(self, shapes: Mapping[Uid, Shape]) -> None:
        self._shapes, self._turn = shapes, 0

    async def reset(self, row: Row, seed: int) -> Opening:
        """At once."""
        self._shape = self._shapes[Uid(row.uid)]
        return Opening()

    async def step(self, message: AssistantMessage) -> Outcome:
        """After the tool's seconds, also after the last turn."""
        seconds = self._shape.tool_s[self._turn]
        self._turn += 1
        await asyncio.sleep(seconds)
        return Outcome((NEXT,), self._turn == len(self._shape.tokens), tool_s=seconds)

    async def reward(self) -> float | None:
        """It gives none."""
        return None

    async def close(self) -> None:
        """Nothing to end."""


@dataclass
class Tools:
    """A pool of them, with room for all."""

    shapes: Mapping[Uid, Shape]
    episodes: int = 0
    collateral: int = 0

    async def open(self) -> Tool:
        """One more."""
        self.episodes += 1
        return Tool(self.shapes)

    def close(self) -> None:
        """Nothing to end."""


class EpisodeStudent(SimulatedStudent):
    """A replica that plays episodes with ``concurrency`` at a time, of which ``slots`` sample.

    Without a ``text`` each rollout is one turn of all tokens of its episode. ``redraws``: another
    try of an episode has another shape; ``tries`` counts those of each prompt.
    """

    def __init__(
        self,
        name: str,
        queue: Queue,
        speed: RolloutPlan,
        shapes: Shapes,
        slots: int,
        concurrency: int,
        text: Text | None,
        redraws: bool = False,
    ) -> None:
        spec: Any = SimpleNamespace(name=name, consumer=name, sampling=SAMPLING)
        room = slots if text is None else concurrency
        super().__init__(spec, queue, speed, room, Lengths(1, 0, 1), 0.0)
        self._engine, self._shapes, self._redraws = Slots(slots), shapes, redraws
        self._playing: dict[Uid, Shape] = {}
        self.tries = Counter[Uid]()
        self._player = None if text is None else player(text, Tools(self._playing))

    async def _roll(self, prompt: Prompt, uid: str) -> Rollout:
        rollout = Uid(uid)
        self.tries[prompt.uid] += 1
        again = f" {self.tries[prompt.uid]}" if self._redraws else ""
        shape = self._shapes.of(f"{prompt.uid}{again}")
        if self._player is None:
            return await self._sampled(prompt, rollout, sum(shape.tokens))
        self._playing[prompt.uid] = shape
        row = Row(prompt.uid, "data", "how much?", None, {})
        asked = replace(prompt, row=row)
        return await self._player.play(asked, rollout, SAMPLING, self._turn, self._engine.reserve)

    async def _turn(self, prompt: Prompt, uid: Uid, sampling: SamplingSpec, turn: int) -> Rollout:
        return await self._sampled(prompt, uid, self._playing[prompt.uid].tokens[turn])

    async def _sampled(self, prompt: Prompt, uid: Uid, length: int) -> Rollout:
        spans = await self._decoder.decode(length)
        logprobs = np.zeros(length, np.float32)
        return Rollout.plain(
            uid, prompt, np.full(length, LETTER, np.int32), logprobs, spans, "stop"
        )

    @property
    def request_s(self) -> float:
        """The integral of running requests until now."""
        self._decoder.tokens  # noqa: B018 - brings it up to now
        return self._decoder.request_s


def player(
    text: Text,
    tools: Opens,
    teachers: Mapping[str, Reading] | None = None,
    history: Literal["append", "template"] = "append",
) -> EpisodePlayer:
    """A player of episodes without bounds."""
    config = CONFIG.model_copy(update={"history": history})
    own = Reading(Turns(text, history), lambda row: row.prompt)
    return EpisodePlayer(config, tools, text, own, teachers or {}, LONGEST)
