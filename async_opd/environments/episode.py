"""One episode: a model's turns, each sampled after all messages before it, in one rollout.

    reset ──► opening ──slot──► sampled turn ──parse──► step ──► messages ──slot──► sampled turn …
                 │                   │                              │                    │
    spans      prompt             student                         tool                student

The tokens of a turn are those that the engine sampled: they are never decoded and encoded again.
An episode that waits for its environment holds no slot. One whose environment's process was ended
because of another begins again with the same seed, and so does one whose replica dies.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field, replace
from hashlib import blake2b
from typing import Any, Protocol, Self

import numpy as np

from async_opd.config.run_config import RunConfig
from async_opd.config.secrets import Redactor
from async_opd.config.sections.environment import ENVIRONMENT, EnvironmentConfig
from async_opd.core.environments import (
    AssistantMessage,
    Collateral,
    Environment,
    Message,
    Opening,
    Outcome,
)
from async_opd.core.errors import LengthError, RolloutFault, in_words
from async_opd.core.printable import on_one_line
from async_opd.core.row import PromptText, Row
from async_opd.core.samples import (
    EpisodeEnd,
    EpisodeFacts,
    Prompt,
    Rollout,
    TeacherView,
    VersionSpan,
)
from async_opd.core.sequence import PROMPT, STUDENT, Int32, spans_of
from async_opd.core.stages import SamplingSpec
from async_opd.core.uid import Uid
from async_opd.data.prompts import filled
from async_opd.environments.pool import Environments, EnvironmentSpec
from async_opd.models.tokenizer import Text
from async_opd.models.turns import Turns

TOOL = "tool"
"""The origin of tokens between two turns: an environment's messages, and the ends of turns."""
MAX_TRIES = 16
"""Of an episode that begins again because of others in its process."""
ASSEMBLY = "this is an error in the assembly of episodes: please report it with the config"

SampleTurn = Callable[[Prompt, Uid, SamplingSpec, int], Awaitable[Rollout]]
"""Samples the turn of this number after the prompt's tokens: a rollout of one span."""
Reserve = Callable[[int], AbstractAsyncContextManager[None]]
"""A slot for the turn of this number."""
Play = Callable[[Prompt, Uid, SamplingSpec, SampleTurn, Reserve], Awaitable[Rollout]]
"""See ``EpisodePlayer.play``."""


class Opens(Protocol):
    """Where environments run: see ``async_opd.environments.pool``."""

    episodes: int
    collateral: int

    async def open(self) -> Environment:
        """Waits for room for one more."""
        ...

    def close(self) -> None:
        """Ends the processes."""
        ...


@dataclass(frozen=True)
class Reading:
    """How a model reads episodes: its template's turns, and a row's prompt."""

    turns: Turns
    prompt: Callable[[Row], PromptText]


@dataclass(frozen=True)
class EpisodeSpec:
    """The episodes of a run, as an engine of its student plays them, or of a ``teacher``."""

    config: RunConfig
    teacher: str | None = None


@dataclass(frozen=True)
class EpisodePlayer:
    """Plays episodes of a run's environment.

    ``longest`` is the most tokens of a sequence that the engine computes. ``teachers`` are those
    that read other prompts or templates than the model that plays. ``seed``: the run's.
    ``closing`` are environments of cancelled episodes.
    """

    config: EnvironmentConfig
    environments: Opens
    text: Text
    own: Reading
    teachers: Mapping[str, Reading]
    longest: int
    seed: int = 0
    closing: set[asyncio.Task[None]] = field(default_factory=set)

    @classmethod
    def of(cls, spec: EpisodeSpec, longest: int) -> Self:
        """The player of an engine. ValueError, OSError for templates and tokenizers."""
        config, text = spec.config, Text.of(spec.config)
        assert config.environment is not None
        teachers = {
            name: _reading(config, text, name)
            for name, teacher in config.teachers.items()
            if spec.teacher is None and (teacher.renders or teacher.prompt_template is not None)
        }
        redacted = Redactor(config.model_dump(mode="json", by_alias=True))

        def say(text: str) -> None:
            print(on_one_line(redacted(text)))

        pool = Environments(EnvironmentSpec.of(config), say)
        own = _reading(config, text, spec.teacher)
        return cls(config.environment, pool, text, own, teachers, longest, config.seed)

    async def play(
        self, prompt: Prompt, uid: Uid, sampling: SamplingSpec, sample: SampleTurn, reserve: Reserve
    ) -> Rollout:
        """The rollout of one episode of the prompt's row; its reward is the environment's, if any.

        RolloutFault for an environment that raises or hangs, and of a turn that cannot be sampled.
        """
        for _ in range(MAX_TRIES):
            environment = await self.environments.open()
            try:
                made = await _Episode(self, prompt, uid, sampling, sample, reserve).run(environment)
            except asyncio.CancelledError:
                # the tool that is at work may take long, and a cancelled run does not wait for it
                self.closing.add(closing := asyncio.create_task(environment.close()))
                closing.add_done_callback(self.closing.discard)
                raise
            except Collateral:
                await environment.close()
            except BaseException:
                await environment.close()
                raise
            else:
                await environment.close()
                return made
        cause = f"rollout {uid} began {MAX_TRIES} times, and each time its process was ended"
        raise RolloutFault(ENVIRONMENT, cause, "raise environment.processes; see its output")

    @property
    def gauges(self) -> dict[str, float]:
        """Episodes that have begun, and those of them that began again because of another."""
        pool = self.environments
        return {"episodes": float(pool.episodes), "collateral": float(pool.collateral)}

    def bounded(self, messages: Sequence[Message]) -> tuple[list[Message], int]:
        """The messages with ``max_observation_tokens`` in all at most; tokens cut off."""
        found, cut, most = [], 0, self.config.max_observation_tokens
        for message in messages:
            text = message.get("content")
            ids = self.text.plain(text) if isinstance(text, str) else []
            if len(ids) > most:
                cut += len(ids) - most
                kept = self.text.decode(ids[:most], special=True)
                message = {**message, "content": f"{kept}\n[{len(ids) - most} tokens cut off]"}
            most = max(most - len(ids), 0)
            found.append(message)
        return found, cut


def _reading(config: RunConfig, text: Text, teacher: str | None) -> Reading:
    """How the student reads episodes, or a teacher; a teacher keeps what its template would not."""
    assert config.environment is not None
    if teacher is None:
        return Reading(Turns(text, config.environment.history), lambda row: row.prompt)
    template = config.teachers[teacher].prompt_template
    turns = Turns(text.of_teacher(config, teacher), "append")
    return Reading(turns, lambda row: row.prompt if template is None else filled(template, row))


def seed_of(seed: int, uid: Uid) -> int:
    """The seed of a prompt's episodes, which all its group's members share: 31 bits of BLAKE2b."""
    digest = blake2b(f"{seed}/{uid}/environment".encode(), digest_size=4).digest()
    return int.from_bytes(digest, "little") >> 1


class _Context:
    """An episode's tokens as one model reads them; ``parts`` are (origin, ids) in order."""

    def __init__(self, reading: Reading, row: Row, opening: Opening) -> None:
        prompt = reading.prompt(row)
        self._own = 1 if isinstance(prompt, str) else len(prompt)  # messages of the data
        self._turns, self._tools = reading.turns, opening.tools
        self._messages: list[Message | AssistantMessage] = [
            *opening.history(prompt, reading.turns.quoted)
        ]
        self.parts: list[tuple[str, Int32]] = []
        self._begin()

    def _begin(self) -> None:
        self._segment, self._thoughts = len(self.parts), False
        self.parts.append((PROMPT, self._turns.opening(self._messages, self._tools, self._own)))

    @property
    def ids(self) -> Int32:
        """The tokens that the next one is sampled after: those of the current segment."""
        return np.concatenate([ids for _, ids in self.parts[self._segment :]])

    @property
    def view(self) -> TeacherView:
        """All of its tokens, as the model reads them."""
        ids = np.concatenate([ids for _, ids in self.parts])
        return TeacherView(ids, spans_of((origin, len(ids)) for origin, ids in self.parts))

    def drop_unread(self) -> None:
        """Drops what follows the last turn: no token is sampled after it."""
        while len(self.parts) > 1 and self.parts[-1][0] != STUDENT:
            self.parts.pop()

    def add(self, turn: Int32) -> None:
        """Adds a sampled turn."""
        self.parts.append((STUDENT, turn))

    def follow(self, answer: AssistantMessage, new: Sequence[Message], begins: bool) -> None:
        """Adds the messages that follow the turn, which is read as ``answer``.

        Where the template would change earlier tokens, the history is rendered again and begins a
        segment, if it may: ValueError otherwise, or if the template refuses the messages.
        """
        self._messages += [answer, *new]
        after = self._turns.after(self.parts[-1][1], new, self._tools, self._thoughts)
        self._thoughts |= bool(answer.thought)
        if after is not None:
            self.parts.append((TOOL, after))
        elif begins:
            self._begin()
        else:
            raise ValueError("the template changes earlier turns (environment.history: refuse)")


@dataclass
class _Episode:
    """One try of an episode. ``digests`` are those of the tokens before each turn."""

    player: EpisodePlayer
    prompt: Prompt
    uid: Uid
    sampling: SamplingSpec
    sample: SampleTurn
    reserve: Reserve
    contexts: list[_Context] = field(default_factory=list)  # the player's own, and its teacher's
    tools: tuple[dict[str, Any], ...] = ()
    turns: list[Rollout] = field(default_factory=list)
    digests: list[bytes] = field(default_factory=list)
    facts: EpisodeFacts = EpisodeFacts(turns=0)  # noqa: RUF009

    async def run(self, environment: Environment) -> Rollout:
        """See EpisodePlayer.play. Collateral."""
        row, player = self.prompt.row, self.player
        if row is None:
            raise RolloutFault(
                ENVIRONMENT, f"prompt {self.prompt.uid} came without its row", ASSEMBLY
            )
        opening = await environment.reset(row, seed_of(player.seed, self.prompt.uid))
        self.tools = opening.tools
        end: EpisodeEnd | None = None
        try:
            for reading in filter(None, (player.own, player.teachers.get(self.prompt.teacher))):
                self.contexts.append(_Context(reading, row, opening))
            while end is None:
                end = await self._turn(environment)
            for context in self.contexts:
                context.drop_unread()
            made = self._joined(end)
        except (ValueError, LengthError) as error:
            cause = f"rollout {self.uid} cannot go on: {in_words(error)}"
            remedy = "set environment.history, or student.chat_template_file"
            raise RolloutFault("prompt", cause, remedy) from error
        return replace(made, reward=await environment.reward())

    async def _turn(self, environment: Environment) -> EpisodeEnd | None:
        """Samples the next turn and gives it to the environment. Why the episode ends, if so."""
        number, context, config = len(self.turns), self.contexts[0].ids, self.player.config
        sampled = sum(len(turn.response_ids) for turn in self.turns)
        left = (config.max_tokens or sampled + self.sampling.max_tokens) - sampled
        most = min(self.sampling.max_tokens, left, self.player.longest - len(context))
        if most <= 0 and not number:
            cause = f"prompt {self.prompt.uid} has {len(context)} tokens with the environment's"
            cause += f" tools and opening, and the engine takes {self.player.longest}"
            raise RolloutFault(
                "prompt", cause, "shorten them, or raise rollout.engine.max_model_len"
            )
        if most <= 0:
            return "context"
        asked = replace(self.prompt, token_ids=context, teacher_ids=None)
        async with self.reserve(number):
            turn = await self.sample(
                asked, self.uid, replace(self.sampling, max_tokens=most), number
            )
        self.turns.append(turn)
        self.digests.append(_digest(context))
        for one in self.contexts:
            one.add(turn.response_ids)
        answer = self.player.own.turns.parse(turn.response_ids, self.tools)
        if turn.finish_reason == "length":
            cut = f"the turn was cut off at {len(turn.response_ids)} tokens"
            answer = replace(answer, calls=(), malformed=(*answer.malformed, cut))
        if answer.malformed and config.on_bad_call == "end":
            self._count(answer, Outcome(), 0)
            return "bad_call"
        outcome = await environment.step(answer)
        new, cut_tokens = self.player.bounded(outcome.messages)
        self._count(answer, outcome, cut_tokens)
        if outcome.done:
            return "done"
        if outcome.unknown and config.on_bad_call == "end":
            return "bad_call"
        if len(self.turns) == config.max_turns:
            return "turns"
        if left <= len(turn.response_ids) and config.max_tokens is not None:
            return "tokens"
        for one in self.contexts:
            one.follow(answer, new, begins=config.history == "template")
        return None

    def _count(self, answer: AssistantMessage, outcome: Outcome, cut: int) -> None:
        facts = self.facts
        self.facts = EpisodeFacts(
            len(self.turns),
            facts.calls + len(answer.calls),
            facts.malformed + len(answer.malformed),
            facts.unknown + outcome.unknown,
            facts.tool_s + outcome.tool_s,
            facts.cut_tokens + cut,
        )

    def _joined(self, end: EpisodeEnd) -> Rollout:
        """The episode's rollout. RolloutFault unless each turn stands where it was sampled."""
        own, first = self.contexts[0].view, self.contexts[0].parts[0][1]
        versions: list[VersionSpan] = []
        at = 0
        for turn in self.turns:
            spans = turn.version_spans
            versions += [VersionSpan(one.version, at + one.start, at + one.end) for one in spans]
            at += len(turn.response_ids)
        cut_off = end != "done" and self.turns[-1].finish_reason == "length"
        best = [turn.topk_ids for turn in self.turns if turn.topk_ids is not None]
        made = Rollout(
            self.uid,
            replace(self.prompt, token_ids=first, teacher_ids=None),
            own.token_ids[len(first) :],
            own.spans,
            np.concatenate(
                [np.empty(0, np.float32), *(one.rollout_logprobs for one in self.turns)]
            ),
            tuple(versions),
            "length" if end in ("tokens", "context") or cut_off else "stop",
            np.concatenate(best) if best else None,
            episode=self.facts._replace(end=end),
            view=self.contexts[1].view if len(self.contexts) > 1 else None,
        )
        self._refuse_moved_turns(made)
        return made

    def _refuse_moved_turns(self, made: Rollout) -> None:
        """RolloutFault unless every sampled token stands after the tokens it was sampled after.

        The engine's own requests and answers are compared with the finished sequence: an error in
        its spans or segments would train tokens in a context that no engine has computed.
        """
        ids, segments = made.token_ids, made.segments
        asked = zip(self.turns, self.digests, strict=True)
        sampled = [(turn.response_ids, one) for turn, one in asked if len(turn.response_ids)]
        for (start, end), (turn, digest) in zip(made.positions, sampled, strict=True):
            begin = max(low for low, _ in segments if low <= start)
            if _digest(ids[begin:start]) != digest or not np.array_equal(ids[start:end], turn):
                cause = f"rollout {made.uid}: its tokens {start} to {end} were sampled elsewhere"
                raise RolloutFault(ENVIRONMENT, cause, ASSEMBLY)


def _digest(ids: Int32) -> bytes:
    return blake2b(np.ascontiguousarray(ids, np.int32).tobytes(), digest_size=16).digest()
