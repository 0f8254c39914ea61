"""The section ``environment``: what answers the student's turns, and the bounds of an episode."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Literal

from pydantic import Field

from async_opd.config.sections.section import Count, Name, Section
from async_opd.config.user_code import ENVIRONMENT_GROUP, names_user_code

ENVIRONMENT = "environment"
"""The grader, and the stage in errors, that is an environment."""
NEEDS = {"class": "factory", "tools": "tools", "gymnasium": "id"}
"""The key that each kind needs."""
MAY_TAKE = {"class": {"kwargs"}, "tools": set(), "gymnasium": {"kwargs", "actions"}}
LATER = ("program", "verifiers", "openenv")
"""Kinds with a name, and nothing else yet."""


class EnvironmentTimeouts(Section):
    """Bounds of an episode's calls, in seconds. A process with a late call is ended."""

    reset_s: float = Field(default=60, gt=0)
    """Timeout of the beginning of an episode."""
    step_s: float = Field(default=60, gt=0)
    """Timeout of the environment's answer to one turn, and of its reward."""
    episode_s: float = Field(default=1800, gt=0)
    """Timeout of a whole episode, from its beginning: with the model's turns, their waits for a
    slot, and pauses of the engine for a weight sync."""
    close_s: float = Field(default=10, gt=0)
    """Timeout of the end of an episode."""


class EnvironmentConfig(Section):
    """Episodes of several turns: an environment answers the student's turns, until it is done.

    Without this section every rollout is one answer.
    """

    kind: Literal["class", "tools", "gymnasium", "program", "verifiers", "openenv"]
    """``class``: a class as TRL's ``environment_factory`` takes it (``reset``, public methods as
    tools, ``get_reward``); ``tools``: a list of functions; ``gymnasium``: an environment of that
    package, with discrete actions. The others are refused: they are not built yet."""
    factory: str | None = None
    """Of kind ``class``: ``module:Class`` or ``file.py:Class``, a function in place of the class
    that makes an environment, or an entry point of the group ``async_opd.environments``."""
    tools: list[str] = Field(default=[])
    """Of kind ``tools``: functions, ``module:function`` or ``file.py:function``, with type hints
    and a docstring that describes each argument."""
    id: str | None = Field(default=None, min_length=1)
    """Of kind ``gymnasium``: the environment's id, such as ``FrozenLake-v1``; ``module:Name-v0``
    imports the module first, which registers it."""
    kwargs: dict[str, Any] = Field(default={})
    """Arguments of the class, or of ``gymnasium.make``."""
    actions: list[Name] = Field(default=[])
    """Of kind ``gymnasium``: a name for each action, in order. The last name in the model's answer
    is its action; without names it is the last integer."""
    max_turns: Count = 16
    """Maximum of the model's turns in an episode."""
    max_tokens: Count | None = None
    """Maximum of an episode's sampled tokens. ``rollout.max_tokens`` is that of one turn."""
    max_observation_tokens: Count = 2048
    """Maximum of tokens of the environment's messages after one turn; the rest is cut off, and
    counted."""
    history: Literal["append", "template", "refuse"] = "append"
    """Where the chat template would change the turns before (it strips thoughts, for example):
    messages are appended after the sampled tokens all the same (``append``), the history is
    rendered again, as a new segment of the episode (``template``), or the episode is a dead letter
    (``refuse``)."""
    on_bad_call: Literal["message", "end"] = "message"
    """A call that cannot be read, or of a tool that is not there: the model gets a message with the
    reason, or the episode ends."""
    processes: Count = 4
    """Maximum of processes with environments in each student replica. They start when they are
    needed, and each has several environments; one that hangs ends its process."""
    concurrency: Count = 64
    """Maximum of environments at the same time in each student replica; further episodes wait."""
    memory_gb: float = Field(default=16, gt=0)
    """Memory bound of a process, in 1e9 bytes of its data, as ``grading.memory_gb``."""
    pass_env: list[Name] = Field(default=[])
    """Further environment variables that a process gets, such as the key of a search engine. By
    themselves processes inherit the same few as graders (``grading.pass_env``)."""
    timeouts: EnvironmentTimeouts = EnvironmentTimeouts()

    def faults(self) -> Iterator[tuple[str, str, str]]:
        """Keys that the kind lacks or does not take: (dotted key, fault, remedy)."""
        if self.kind in LATER:
            fault = f"found {self.kind}, which is not built yet"
            yield "environment.kind", fault, "built later: use kind: class, with a class around it"
            return
        need = NEEDS[self.kind]
        if not getattr(self, need):
            fault = f"found {getattr(self, need)!r}, which kind: {self.kind} needs"
            yield f"environment.{need}", fault, f"set it, or take one of {', '.join(NEEDS)}"
        own = {need, *MAY_TAKE[self.kind]}
        for key in ("factory", "tools", "id", "kwargs", "actions"):
            if key not in own and getattr(self, key):
                takers = ", ".join(kind for kind in NEEDS if key in {NEEDS[kind], *MAY_TAKE[kind]})
                fault = f"found {getattr(self, key)!r}, which kind: {self.kind} does not take"
                yield f"environment.{key}", fault, f"remove it; it is of kind {takers}"
        if (
            self.kind == "class"
            and self.factory
            and not names_user_code(self.factory, ENVIRONMENT_GROUP)
        ):
            yield _not_code("factory", self.factory)
        for tool in self.tools if self.kind == "tools" else ():
            if ":" not in tool:
                yield _not_code("tools", tool)
        for key, names in (("tools", self.tool_names), ("actions", self.actions)):
            twice = sorted({name for name in names if names.count(name) > 1})
            if twice:
                fault = f"found {twice[0]!r} twice: the model calls by name"
                yield f"environment.{key}", fault, "give each another name"

    @property
    def code(self) -> list[str]:
        """The names of the user's code."""
        imports = self.id is not None and ":" in self.id
        return [*filter(None, [self.factory, self.id if imports else None]), *self.tools]

    @property
    def has_tools(self) -> bool:
        """Whether the student's turns call tools."""
        return self.kind != "gymnasium"

    @property
    def tool_names(self) -> list[str]:
        """The names of ``tools`` that the model reads."""
        return [tool.rpartition(":")[2].rpartition(".")[2] for tool in self.tools]


def _not_code(key: str, name: str) -> tuple[str, str, str]:
    fault = f"found {name!r}, expected module:name"
    return f"environment.{key}", fault, "for example my_package.environments:Wordle"
