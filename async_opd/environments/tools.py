"""Functions as tools of a model: their JSON schemas, and calls that never raise.

``transformers`` makes the schemas of type hints and docstrings, as in TRL: the student of either
reads the same prompt.
"""

from __future__ import annotations

import asyncio
import inspect
import json
import sys
from collections.abc import Callable, Mapping
from typing import Any
from unittest.mock import patch

from async_opd.core.environments import AssistantMessage, Message, Outcome, ToolCall
from async_opd.core.errors import StageError

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
