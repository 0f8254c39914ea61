"""Episodes without engines and processes: turns from a script, and an environment that answers."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractAsyncContextManager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from async_opd.config.sections.environment import EnvironmentConfig
from async_opd.core.environments import AssistantMessage, Message, Opening, Outcome
from async_opd.core.row import Row
from async_opd.core.samples import Prompt, Rollout, VersionSpan
from async_opd.core.stages import SamplingSpec
from async_opd.core.uid import Uid, rollout_uid
from async_opd.environments.episode import EpisodePlayer, Reading
from async_opd.models.tokenizer import Text
from async_opd.models.turns import History, Turns

SAMPLING = SamplingSpec(64, 1.0, 1.0, 1)
ROW = Row("0:0", "sums", "how much?", "3", {})
PROMPT = Prompt(Uid("0:0#0"), "sums", "teacher", np.zeros(1, np.int32), ROW)


def reading(text: Text, history: History = "append") -> Reading:
    """How a model with this tokenizer and template reads episodes."""
    return Reading(Turns(text, history), lambda row: row.prompt)


@dataclass
class ScriptedEnvironment:
    """Gives its outcomes in turn, and is done after the last; an exception is raised."""

    outcomes: Sequence[Outcome | Exception]
    opening: Opening = Opening()  # noqa: RUF009
    given_reward: float | None = None
    seeds: list[int] = field(default_factory=list)
    turns: list[AssistantMessage] = field(default_factory=list)
    closed: int = 0

    async def reset(self, row: Row, seed: int) -> Opening:
        self.seeds.append(seed)
        return self.opening

    async def step(self, message: AssistantMessage) -> Outcome:
        self.turns.append(message)
        outcome = self.outcomes[len(self.turns) - 1]
        if isinstance(outcome, Exception):
            raise outcome
        return replace(outcome, done=outcome.done or len(self.turns) == len(self.outcomes))

    async def reward(self) -> float | None:
        return self.given_reward

    async def close(self) -> None:
        self.closed += 1


@dataclass
class Opened:
    """Opens the given environments in turn."""

    left: list[ScriptedEnvironment]
    episodes: int = 0
    collateral: int = 0

    async def open(self) -> ScriptedEnvironment:
        self.episodes += 1
        return self.left.pop(0)

    def close(self) -> None: ...


@dataclass
class ScriptedStudent:
    """Samples the tokens of its texts in turn; ``requests`` are the contexts that it was given.

    A text without the end of a turn was cut off. Version n sampled turn n.
    """

    text: Text
    texts: Sequence[str]
    requests: list[list[int]] = field(default_factory=list)
    most: list[int] = field(default_factory=list)
    sampled: list[list[int]] = field(default_factory=list)
    reserved: list[int] = field(default_factory=list)

    async def sample(self, prompt: Prompt, uid: Uid, sampling: SamplingSpec, turn: int) -> Rollout:
        ids = self.text.quoted_ids(self.texts[len(self.requests)])[: sampling.max_tokens]
        self.requests.append(prompt.token_ids.tolist())
        self.most.append(sampling.max_tokens)
        self.sampled.append(ids)
        ended = ids[-1] in self.text.response_ends()
        logprobs = -np.arange(1, len(ids) + 1, dtype=np.float32) - 100 * turn
        spans = (VersionSpan(turn, 0, len(ids)),)
        given = (np.asarray(ids, np.int32), logprobs, spans, "stop" if ended else "length")
        return Rollout.plain(uid, prompt, *given)  # type: ignore[arg-type]

    def reserve(self, turn: int) -> AbstractAsyncContextManager[None]:
        self.reserved.append(turn)
        return nullcontext()


async def played(
    student: ScriptedStudent,
    environments: Sequence[ScriptedEnvironment],
    own: Reading,
    teachers: dict[str, Reading] | None = None,
    longest: int = 10_000,
    **config: Any,
) -> Rollout:
    """The rollout of an episode; ``config`` are keys of the section ``environment``."""
    section = EnvironmentConfig(kind="class", factory="a:B", **config)
    pool = Opened([*environments])
    player = EpisodePlayer(section, pool, student.text, own, teachers or {}, longest)
    uid = rollout_uid(PROMPT.uid, 0)
    return await player.play(PROMPT, uid, SAMPLING, student.sample, student.reserve)


def tool(content: str) -> Message:
    """A tool's message."""
    return {"role": "tool", "name": "add", "content": content}
