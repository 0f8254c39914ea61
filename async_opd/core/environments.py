"""Episodes: the messages between a model that takes several turns and its environment.

    reset ──Opening──► context ──sampled turn──► AssistantMessage ──step──► Outcome ──┐
                          ▲                                                           │
                          └── the messages of the outcome, rendered after the sampled ┘
                              tokens; until it is done, or a bound of the episode is reached

Chat messages are those of chat templates: ``{"role": "tool", "name": …, "content": …}``.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

from async_opd.core.row import PromptText, Row

Message = dict[str, Any]
"""A chat message, as templates read it."""


@dataclass(frozen=True)
class ToolCall:
    """A call that was read from a sampled turn; its ``arguments`` are a JSON object."""

    name: str
    arguments: dict[str, Any]


@dataclass(frozen=True)
class AssistantMessage:
    """One sampled turn, read from its tokens.

    ``content`` is its text without thought and calls, ``thought`` the text of its thought.
    ``malformed`` has the reason for each call that could not be read: these are values, no errors.
    """

    content: str
    thought: str = ""
    calls: tuple[ToolCall, ...] = ()
    malformed: tuple[str, ...] = ()


@dataclass(frozen=True)
class Opening:
    """Additions of an environment to the row's prompt: ``messages`` after its own, and ``tools``.

    ``text`` comes right after the content of the prompt's last message, as TRL appends it. A tool
    is the JSON schema of a function: ``{"type": "function", "function": {"name": …,
    "description": …, "parameters": …}}``.
    """

    messages: tuple[Message, ...] = ()
    tools: tuple[dict[str, Any], ...] = ()
    text: str = ""

    def history(
        self, prompt: PromptText, quoted: Callable[[str], str] = lambda text: text
    ) -> list[Message]:
        """The messages with which the episode begins; a plain text is one of the user.

        ``quoted`` makes of ``text`` what may stand in a message of the data.
        """
        plain: list[Message] = [{"role": "user", "content": prompt}]
        first = plain if isinstance(prompt, str) else list(prompt)
        if self.text and first:
            last, text = first[-1], quoted(self.text)
            content = last.get("content") or ""
            if isinstance(content, str):
                content += text
            else:
                content = [*content, {"type": "text", "text": text}]
            first[-1] = {**last, "content": content}
        return [*first, *self.messages]


@dataclass(frozen=True)
class Outcome:
    """The environment's answer to a turn: ``messages`` to append, and whether the episode is over.

    ``unknown`` is the number of calls of tools that do not exist, or with other arguments than they
    take; ``tool_s`` the seconds that the environment's own code took.
    """

    messages: tuple[Message, ...] = ()
    done: bool = False
    unknown: int = 0
    tool_s: float = 0.0


class Environment(Protocol):
    """The environment of one episode.

    Each method is bounded in time. RolloutFault (stage ``environment``) if it raises, hangs or its
    process ends; Collateral if its process was ended for another episode's sake.
    """

    async def reset(self, row: Row, seed: int) -> Opening:
        """Begins an episode; the same row and seed begin the same one."""
        ...

    async def step(self, message: AssistantMessage) -> Outcome:
        """Takes one turn of the model."""
        ...

    async def reward(self) -> float | None:
        """The episode's reward, once it is over; None if the environment gives none."""
        ...

    async def close(self) -> None:
        """Ends the episode; may be called at any time, and more than once."""
        ...


class Collateral(Exception):
    """The process of an episode's environment was ended because another episode in it hung.

    The episode begins again with the same seed; the episode is not at fault.
    """
