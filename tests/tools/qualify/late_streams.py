"""CUDA's streams on a CPU: what is queued is done only when somebody waits for it.

    torch operation ──mode──► queue of the thread's stream ··· synchronize, an event ──► done

That is the latest that a GPU may be. A tensor that is read on another stream before has not got its
values, which stay as they were.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from async_opd.tools.qualify.measurements import streams, vllm_streams

Work = Callable[[], object]


class LateGpu:
    """The current stream of each thread; a thread begins with the default stream."""

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self.streams: list[Stream] = []
        self.local = threading.local()
        self.default = Stream(self)

    @property
    def current(self) -> Stream:
        """The stream of the calling thread."""
        found: Stream = getattr(self.local, "stream", self.default)
        return found

    def set_stream(self, stream: Stream) -> None:
        """See torch.cuda.set_stream."""
        self.local.stream = stream

    @contextmanager
    def stream(self, inner: Stream) -> Iterator[None]:
        """See torch.cuda.stream."""
        outer = self.current
        self.set_stream(inner)
        yield
        self.set_stream(outer)

    def finish(self, *_: Any) -> None:
        """Waits for all streams."""
        for stream in self.streams:
            stream.synchronize()

    def install(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Replaces torch.cuda's streams and events."""
        for name, value in {
            "Stream": lambda *_: Stream(self),
            "Event": lambda **_: Event(self),
            "stream": self.stream,
            "current_stream": lambda *_: self.current,
            "set_stream": self.set_stream,
            "current_device": lambda: 0,
            "is_initialized": lambda: True,
        }.items():
            monkeypatch.setattr(torch.cuda, name, value)
        monkeypatch.setattr(streams, "finish", self.finish)
        monkeypatch.setattr(vllm_streams, "_of_thread", threading.local())


class Stream:
    """The queued work, in order."""

    def __init__(self, gpu: LateGpu) -> None:
        self.gpu = gpu
        self.queued: list[Work] = []
        gpu.streams.append(self)

    def until(self, last: Work) -> None:
        """Does what was queued, up to ``last``."""
        with self.gpu.lock, _disable_current_modes():
            while last in self.queued:
                self.queued.pop(0)()

    def synchronize(self) -> None:
        """Does all that was queued."""
        self.until(self.mark())

    def mark(self) -> Work:
        """Something that is queued now and does nothing."""
        mark: Work = partial(int)
        self.queued.append(mark)
        return mark

    def wait_stream(self, other: Stream) -> None:
        """Later work of this stream waits for the other's present work."""
        self.queued.append(partial(other.until, other.mark()))


class Event:
    """A mark in the stream of the thread that records it."""

    def __init__(self, gpu: LateGpu) -> None:
        self.gpu = gpu

    def record(self) -> None:
        """See torch.cuda.Event.record."""
        self.stream, self.mark = self.gpu.current, self.gpu.current.mark()

    def synchronize(self) -> None:
        """See torch.cuda.Event.synchronize."""
        self.stream.until(self.mark)


class Late(TorchDispatchMode):
    """Queues the operations of the thread that enters it; views are made at once."""

    def __init__(self, gpu: LateGpu) -> None:
        super().__init__()
        self.gpu = gpu

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        call = partial(func, *args, **(kwargs or {}))
        if func is torch.ops.aten._local_scalar_dense.default:  # the host reads: it waits
            self.gpu.current.synchronize()
            return call()
        if any(returned.alias_info for returned in func._schema.returns):
            return self._in_place_or_view(func, call)
        shaped = torch.zeros_like(call())
        self.gpu.current.queued.append(lambda: shaped.copy_(call()))
        return shaped

    def _in_place_or_view(self, func: Any, call: partial[Any]) -> Any:
        written = [
            argument.name
            for argument in func._schema.arguments
            if argument.alias_info is not None and argument.alias_info.is_write
        ]
        if not written:
            return call()
        self.gpu.current.queued.append(call)
        return call.keywords["out"] if "out" in call.keywords else call.args[0]
