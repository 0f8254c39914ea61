"""The kinds of environments in their process: classes of TRL's kind, functions, gymnasium's.

Functions are tools of a model: they have JSON schemas, and their calls never raise.
``transformers`` makes the schemas of type hints and docstrings, as in TRL: the student of either
reads the same prompt.
"""

from __future__ import annotations

import asyncio
import inspect
import json
import re
import sys
from collections.abc import Callable, Mapping
from functools import partial
from types import MethodType
from typing import Any, Protocol
from unittest.mock import patch

from async_opd.config.sections.environment import EnvironmentConfig
from async_opd.config.user_code import ENVIRONMENT_GROUP, UserCodeError, user_object
from async_opd.core.environments import AssistantMessage, Message, Opening, Outcome, ToolCall
from async_opd.core.errors import StageError
from async_opd.core.row import Row

REMEDY = "give it type hints, and a docstring whose Args: describes each argument"
UNKNOWN = "unknown"
"""The tool that a message is from which answers a call that could not be read."""


def schemas_of(functions: Mapping[str, Callable[..., Any]]) -> tuple[dict[str, Any], ...]:
    """The JSON schema of each tool. StageError for one without type hints or docstring."""
    from transformers.utils import chat_template_utils as templates

    # Only to know a hint that is a tensor it imports torch, which each of a replica's processes
    # would have in memory. A tool whose hints are tensors has imported torch itself.
    imported = patch.object(templates, "is_torch_available", lambda: "torch" in sys.modules)
    found = []
    for name, function in functions.items():
        try:
            with imported:
                found.append(templates.get_json_schema(function))
        except Exception as error:  # its parsers raise several kinds
            cause = f"the tool {name} cannot be shown to a model: {error}"
            raise StageError("environment", cause, REMEDY) from error
    return tuple(found)


class Caller:
    """Calls functions, async ones on an event loop that lasts as long as it: of one thread."""

    def __init__(self) -> None:
        self._runner = asyncio.Runner()

    def call(self, function: Callable[..., Any], *given: Any, **named: Any) -> Any:
        """The result, awaited if it is to be."""
        found = function(*given, **named)

        async def awaited() -> Any:
            return await found

        return self._runner.run(awaited()) if inspect.isawaitable(found) else found

    def close(self) -> None:
        """Ends the event loop with all that still runs in it."""
        self._runner.close()


def played(
    functions: Mapping[str, Callable[..., Any]], caller: Caller, message: AssistantMessage
) -> Outcome:
    """The answers to all calls of a turn, one message each; a turn without a call is the last.

    MemoryError comes through: the process has too little for its other environments, too.
    """
    texts, unknown = [], 0
    for call in message.calls:
        function = functions.get(call.name)
        fault = _misfit(function, call, functions)
        unknown += bool(fault)
        texts.append((call.name, _error(fault) if fault else _result(caller, function, call)))
    texts += [(UNKNOWN, _error(reason)) for reason in message.malformed]
    messages: list[Message] = [{"role": "tool", "name": n, "content": text} for n, text in texts]
    return Outcome(tuple(messages), not messages, unknown)


def _misfit(function: Callable[..., Any] | None, call: ToolCall, known: Mapping[str, Any]) -> str:
    """Why the call cannot be made; '' if the tool exists and takes its arguments."""
    if function is None:
        return f"the tool {call.name!r} does not exist; the tools are {', '.join(known)}"
    signature = inspect.signature(function)
    try:
        signature.bind(**call.arguments)
    except TypeError as error:
        return f"{call.name}{signature} does not take these arguments: {error}"
    return ""


def _result(caller: Caller, function: Callable[..., Any] | None, call: ToolCall) -> str:
    assert function is not None
    try:
        found = caller.call(function, **call.arguments)
        return found if isinstance(found, str) else json.dumps(found, default=str)
    except MemoryError:
        raise
    except BaseException as error:  # a tool can raise anything; the model reads it
        return _error(str(error) or type(error).__name__)


def _error(text: str) -> str:
    return json.dumps({"error": text}, ensure_ascii=False)


NO_TOOLS = ("reset", "get_reward", "close")
"""Public methods that a model does not call."""
EXTRA = "pip install 'async-opd[environments]'"
INTEGER = re.compile(r"-?\d+")
MARKED = re.compile(r"\x1b\[[1-9][\d;]*m(.*?)\x1b\[0?m", re.DOTALL)
"""A part of a rendered text in another colour: where the player is, for example."""
ESCAPE = re.compile(r"\x1b\[[\d;?]*[A-Za-z]")


class Played(Protocol):
    """``core.environments.Environment`` on the other side: plain calls in the process."""

    def reset(self, row: Row, seed: int) -> Opening: ...

    def step(self, message: AssistantMessage) -> Outcome: ...

    def reward(self) -> float | None: ...

    def close(self) -> None: ...


def kind_of(config: EnvironmentConfig) -> Callable[[], Played]:
    """Makes environments as the section says. StageError for what cannot be one."""
    try:
        if config.kind == "tools":
            functions = dict(
                zip(config.tool_names, (user_object(one, "") for one in config.tools), strict=True)
            )
            return partial(ToolEnvironment, functions, schemas_of(functions))
        if config.kind == "gymnasium":
            return _gymnasium(config)
        assert config.factory is not None
        factory = user_object(config.factory, ENVIRONMENT_GROUP)
    except UserCodeError as error:
        cause = str(error).removeprefix(f"{config.factory} cannot be loaded: ")
        raise StageError("environment", cause, "put its module on PYTHONPATH") from error
    if inspect.isclass(factory):  # else its tools are known once it has made one
        _schemas(factory)
    return lambda: _of_class(factory(**config.kwargs))


def _of_class(made: Any) -> ToolEnvironment:
    kind = type(made)
    functions = {name: getattr(made, name) for name in _tool_names(kind)}
    return ToolEnvironment(functions, _schemas(kind), made)


SCHEMAS: dict[type, tuple[dict[str, Any], ...]] = {}
"""By class: it is read once in each process."""


def _schemas(kind: type) -> tuple[dict[str, Any], ...]:
    """The schemas of a class's tools. StageError for a class that is not an environment."""
    if kind not in SCHEMAS:
        where = f"{kind.__module__}.{kind.__qualname__}"
        names = _tool_names(kind)
        if not callable(getattr(kind, "reset", None)):
            cause = f"{where} has no method reset"
            raise StageError("environment", cause, "add reset(self, **row) -> str | None")
        if not names:
            cause = f"{where} has no tools: no public method beside {', '.join(NO_TOOLS)}"
            raise StageError("environment", cause, "add the methods that the model may call")
        static = inspect.getattr_static
        bound = {
            name: one if isinstance(static(kind, name), staticmethod) else MethodType(one, kind)
            for name in names
            if (one := getattr(kind, name))
        }
        SCHEMAS[kind] = schemas_of(bound)
    return SCHEMAS[kind]


def _tool_names(kind: type) -> list[str]:
    """The methods that TRL shows to the model: functions of the class, by name."""
    return [
        name
        for name, _ in inspect.getmembers(kind, inspect.isfunction)
        if not (name.startswith("_") or name in NO_TOOLS)
    ]


class ToolEnvironment:
    """Tools that a model calls: functions, or the methods of ``made``, an object of TRL's kind."""

    def __init__(
        self,
        functions: Mapping[str, Callable[..., Any]],
        schemas: tuple[dict[str, Any], ...],
        made: Any = None,
    ) -> None:
        self._functions, self._schemas, self._made = functions, schemas, made
        self._caller = Caller()

    def reset(self, row: Row, seed: int) -> Opening:
        """The row's fields are its arguments, as far as it takes them; and ``seed`` if it does."""
        text = None
        if self._made is not None:
            taken = inspect.signature(self._made.reset).parameters
            given = {"seed": seed, **row.fields} if "seed" in taken else row.fields
            if not any(one.kind is inspect.Parameter.VAR_KEYWORD for one in taken.values()):
                given = {key: value for key, value in given.items() if key in taken}
            text = self._caller.call(self._made.reset, **given)
        if not isinstance(text, str | None):
            cause = f"reset returned {type(text).__name__}, expected a text or None"
            raise StageError("environment", cause, "images are not read yet: return their text")
        return Opening(tools=self._schemas, text=text or "")

    def step(self, message: AssistantMessage) -> Outcome:
        """Calls what the turn calls."""
        return played(self._functions, self._caller, message)

    def reward(self) -> float | None:
        """That of ``get_reward``, if there is one."""
        reward = getattr(self._made, "get_reward", None)
        return None if reward is None else float(self._caller.call(reward))

    def close(self) -> None:
        """Calls ``close``, if there is one."""
        try:
            close = getattr(self._made, "close", None)
            if callable(close):
                self._caller.call(close)
        finally:
            self._caller.close()


def _gymnasium(config: EnvironmentConfig) -> Callable[[], Played]:
    """Environments with discrete actions. StageError for any other one."""
    try:
        import gymnasium
    except ImportError as error:
        raise StageError("environment", "gymnasium is not installed", EXTRA) from error
    make = partial(gymnasium.make, config.id, **config.kwargs)
    try:
        probe = make()
    except Exception as error:  # of a missing environment, or of arguments
        cause = f"{type(error).__name__}: {error}"
        raise StageError(
            "environment", cause, "see environment.id and environment.kwargs"
        ) from error
    space = probe.action_space
    probe.close()
    if not isinstance(space, gymnasium.spaces.Discrete):
        cause = f"{config.id} has actions {space}, and a model's answer names one of a few"
        raise StageError("environment", cause, "write a class with tools around it (kind: class)")
    if config.actions and len(config.actions) != space.n:
        cause = f"environment.actions has {len(config.actions)} names, {config.id} {space.n}"
        raise StageError("environment", cause, "name each action, in order, or none")
    first = int(space.start)
    names = config.actions or [str(first + at) for at in range(int(space.n))]
    return lambda: GymnasiumEnvironment(make(), {name: first + at for at, name in enumerate(names)})


class GymnasiumEnvironment:
    """An environment of gymnasium: its observations are texts, the answer's last name acts."""

    def __init__(self, made: Any, actions: Mapping[str, int]) -> None:
        self._made, self._actions = made, actions
        self._reward = 0.0
        named = sorted(map(re.escape, actions), key=len, reverse=True)
        numbers = all(INTEGER.fullmatch(name) for name in actions)
        any_name = re.compile(rf"(?<!\w)({'|'.join(named)})(?!\w)", re.IGNORECASE)
        self._name = INTEGER if numbers else any_name

    def reset(self, row: Row, seed: int) -> Opening:
        """The first observation follows the row's prompt, after an empty line."""
        observation, _ = self._made.reset(seed=seed)
        return Opening(text=f"\n\n{self._shown(observation)}")

    def step(self, message: AssistantMessage) -> Outcome:
        """Acts; an answer without one of the actions gets a message that lists them."""
        known = {name.lower(): action for name, action in self._actions.items()}
        found = [one[0].lower() for one in self._name.finditer(message.content)]
        if message.malformed or not found or found[-1] not in known:
            reasons = message.malformed or (f"The actions are: {', '.join(self._actions)}.",)
            answers = tuple(_of_user(reason) for reason in reasons)
            return Outcome(answers, unknown=int(not message.malformed))
        observation, reward, terminated, truncated, _ = self._made.step(known[found[-1]])
        self._reward += float(reward)
        return Outcome((_of_user(self._shown(observation)),), bool(terminated or truncated))

    def reward(self) -> float:
        """The sum of the rewards of all steps."""
        return self._reward

    def close(self) -> None:
        """Closes the environment."""
        self._made.close()

    def _shown(self, observation: Any) -> str:
        """As text; in a rendered one brackets are around what a terminal shows in a colour."""
        shown = str(self._made.render() if self._made.render_mode == "ansi" else observation)
        return ESCAPE.sub("", MARKED.sub(r"[\1]", shown)).strip("\n")


def _of_user(text: str) -> Message:
    return {"role": "user", "content": text}
