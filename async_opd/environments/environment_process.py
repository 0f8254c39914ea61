"""A process with many environments: each plays in a separate thread, and they answer in any order.

``async_opd.environments.pool`` starts it and reads its answers. The first request of an environment
makes it, so that its constructor is a part of ``reset``.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import asdict, replace
from queue import SimpleQueue
from threading import Thread
from typing import Any, NamedTuple

from async_opd.config.sections.environment import EnvironmentConfig
from async_opd.core.environments import Outcome
from async_opd.core.errors import StageError
from async_opd.environments.kinds import Played, kind_of
from async_opd.processes.in_user_process import Reply, answered, serve

MAX_CHARACTERS = 1 << 20
"""Characters of all messages of an answer together. The rest is cut off: it would be far beyond any
``max_observation_tokens``."""


class _Call(NamedTuple):
    reply: Reply
    method: str
    given: tuple[Any, ...]


def load(config: EnvironmentConfig) -> Callable[..., None]:
    """Environments of this kind, as a function of a Reply, an environment's name and its call."""
    make = kind_of(config)
    calls: dict[str, SimpleQueue[_Call]] = {}

    def handle(reply: Reply, name: str, method: str, *given: Any) -> None:
        if not name:
            return reply()  # the process is not stuck
        if name not in calls:
            calls[name] = SimpleQueue()
            Thread(target=_play, args=(make, calls[name]), daemon=True).start()
        calls[name].put(_Call(reply, method, given))
        if method == "close":
            del calls[name]
        return None

    return handle


def _play(make: Callable[[], Played], calls: SimpleQueue[_Call]) -> None:
    """The life of one environment, from its first call to ``close``."""
    made: list[Played] = []

    def called(method: str, *given: Any) -> Any:
        try:
            if not made:
                made.append(make())
            began = time.perf_counter()
            value = getattr(made[0], method)(*given)
            if isinstance(value, Outcome):
                value = replace(value, tool_s=time.perf_counter() - began)
            return _as_json(value)
        except StageError:
            raise
        except MemoryError as error:
            cause = f"{method} needed more memory than environment.memory_gb"
            raise StageError("environment", cause, "raise it, or need less") from error
        except BaseException as error:  # a user's environment can raise anything: it is answered
            cause = f"{method} failed: {type(error).__name__}: {error}"
            raise StageError("environment", cause, "see its class") from error

    method = ""
    while method != "close":
        reply, method, given = calls.get()
        if method == "close" and not made:
            reply()
        else:
            answered(reply, called, method, *given)


def _as_json(value: Any) -> Any:
    """The value in JSON's types; the contents of its messages are cut to their share."""
    if value is None or isinstance(value, float):
        if value is not None and not math.isfinite(value):
            raise ValueError(f"the reward is {value}, expected a finite number")
        return value
    found = asdict(value)
    share = MAX_CHARACTERS // max(len(found["messages"]), 1)
    for message in found["messages"]:
        message["content"] = message["content"][:share]
    if "text" in found:
        found["text"] = found["text"][:share]
    return found


if __name__ == "__main__":
    serve(load)
