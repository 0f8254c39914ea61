"""NCCL and CUDA's streams without a GPU, below vLLM's own PyNcclCommunicator.

    ncclBroadcast ──queued──► a stream ──synchronize──► waits until every rank has queued its own
                                                        or its communicator is aborted

Nothing here ever times out, as with NCCL. A broadcast that is aborted ends as if it had succeeded,
and has moved no bytes; the abort goes on for ``ABORT_S`` after that. A communicator that is used
after its abort began fails the test: NCCL is freeing its memory. Each rank is a thread, and has the
current stream of its thread.
"""

from __future__ import annotations

import ctypes
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
import torch

ABORT_S = 0.05
"""Seconds that an abort takes to free its communicator, after the broadcasts have ended."""


class Stream:
    """A CUDA stream: what was queued, in order."""

    device = torch.device("cpu")

    def __init__(self, *_: Any, **__: Any) -> None:
        self.cuda_stream = id(self)
        self.queued: list[Callable[[], None]] = []
        Gpu.streams[self.cuda_stream] = self

    def wait_stream(self, other: Stream) -> None:
        self.queued += other.queued

    def synchronize(self) -> None:
        while self.queued:
            self.queued.pop(0)()


class Broadcast:
    """One broadcast of all ranks: address and bytes of each rank's buffer."""

    def __init__(self) -> None:
        self.buffers: dict[int, tuple[int, int]] = {}
        self.moved = False

    def move(self, root: int) -> None:
        sent, nbytes = self.buffers[root]
        for rank, (address, expected) in self.buffers.items():
            assert expected == nbytes, f"rank {rank} expects {expected} bytes, not {nbytes}"
            ctypes.memmove(address, sent, nbytes)
        self.moved = True


class World:
    """The ranks that share a unique id."""

    def __init__(self) -> None:
        self.changed = threading.Condition()
        self.ranks: list[int] = []
        self.operations: list[Broadcast] = []


class Communicator:
    """One rank's handle."""

    def __init__(self, world: World, rank: int, size: int) -> None:
        self.world, self.rank, self.size = world, rank, size
        self.next = 0
        self.aborted = False

    def operation(self) -> Broadcast:
        """This rank's next one."""
        with self.world.changed:
            while len(self.world.operations) <= self.next:
                self.world.operations.append(Broadcast())
        self.next += 1
        return self.world.operations[self.next - 1]


class Gpu:
    """Observed and decided by a test: ``worlds`` by unique id; ``calls`` of NCCL by name.

    ``freed_used`` names the calls with a communicator whose abort had begun.
    """

    streams: ClassVar[dict[int, Stream]] = {}

    def __init__(self) -> None:
        self.worlds: dict[bytes, World] = {}
        self.calls: Counter[str] = Counter()
        self.freed_used: list[str] = []
        self.local = threading.local()

    def current_stream(self, *_: Any) -> Stream:
        if not hasattr(self.local, "stream"):
            self.local.stream = Stream()
        found: Stream = self.local.stream
        return found

    def set_stream(self, stream: Stream) -> None:
        self.local.stream = stream

    def synchronize(self) -> None:
        self.current_stream().synchronize()

    def ended_all(self) -> None:
        """Lets every rank that still waits go: the end of a test."""
        for world in self.worlds.values():
            with world.changed:
                world.ranks += [-1] * 100
                for operation in world.operations:
                    operation.moved = True
                world.changed.notify_all()


class Library:
    """Stands for vLLM's NCCLLibrary."""

    gpu: Gpu

    def __init__(self, so_file: str | None = None) -> None: ...

    def ncclGetRawVersion(self) -> int:  # noqa: N802
        return 22900

    def ncclGetUniqueId(self) -> Any:  # noqa: N802
        number = len(self.gpu.worlds) + 1
        self.gpu.worlds[number.to_bytes(128)] = World()
        return self.unique_id_from_bytes(number.to_bytes(128))

    def unique_id_from_bytes(self, data: bytes) -> Any:
        return SimpleNamespace(internal=data)

    def ncclCommInitRank(self, world_size: int, unique_id: Any, rank: int) -> Communicator:  # noqa: N802
        self.gpu.calls["ncclCommInitRank"] += 1
        world = self.gpu.worlds[bytes(unique_id.internal)]
        with world.changed:
            world.ranks.append(rank)
            world.changed.notify_all()
            world.changed.wait_for(lambda: len(world.ranks) >= world_size)
        return Communicator(world, rank, world_size)

    def ncclAllReduce(self, *_: Any) -> None:  # noqa: N802
        self.gpu.calls["ncclAllReduce"] += 1

    def ncclBroadcast(  # noqa: N802
        self, _: Any, recv: Any, count: int, dtype: int, root: int, comm: Communicator, stream: Any
    ) -> None:
        self.gpu.calls["ncclBroadcast"] += 1
        if comm.aborted:
            self.gpu.freed_used.append("ncclBroadcast")
        world, operation = comm.world, comm.operation()

        def run() -> None:
            with world.changed:
                world.changed.wait_for(lambda: comm.aborted or operation.moved)

        with world.changed:
            operation.buffers[comm.rank] = recv.value, count
            if len(operation.buffers) == comm.size:
                operation.move(root)
                world.changed.notify_all()
        Gpu.streams[stream.value].queued.append(run)

    def ncclCommAbort(self, comm: Communicator) -> None:  # noqa: N802
        self.gpu.calls["ncclCommAbort"] += 1
        with comm.world.changed:
            if comm.aborted:
                self.gpu.freed_used.append("ncclCommAbort")
            comm.aborted = True
            for operation in comm.world.operations:
                if not operation.moved:
                    operation.buffers.pop(comm.rank, None)
            comm.world.changed.notify_all()
        time.sleep(ABORT_S)
        self.gpu.calls["ncclCommAbort returned"] += 1


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[Gpu]:
    """A process with a GPU, as far as vLLM's communicator and our transport look."""
    import vllm.platforms
    import vllm.utils.torch_utils
    import vllm.v1.worker.gpu_worker  # before its imports ask for the platform
    from vllm.distributed.device_communicators import pynccl, pynccl_wrapper

    gpu = Library.gpu = Gpu()
    Gpu.streams.clear()

    @contextmanager
    def stream(inner: Stream) -> Iterator[None]:
        outer = gpu.current_stream()
        torch.cuda.set_stream(inner)
        yield
        torch.cuda.set_stream(outer)

    for module in (pynccl, pynccl_wrapper):
        monkeypatch.setattr(module, "NCCLLibrary", Library)
    monkeypatch.setattr(vllm.platforms.current_platform, "is_cuda", lambda: True)
    monkeypatch.setattr(vllm.utils.torch_utils, "prev_set_stream", gpu.set_stream)
    of_vllm = vllm.utils.torch_utils._patched_set_stream  # vLLM's worker of CPUs replaces it
    monkeypatch.setattr(torch.cuda, "set_stream", of_vllm)
    monkeypatch.setattr(vllm.utils.torch_utils, "_current_stream_tls", threading.local())
    monkeypatch.setattr(torch.cuda, "Stream", Stream)
    monkeypatch.setattr(torch.cuda, "stream", stream)
    monkeypatch.setattr(torch.cuda, "current_stream", gpu.current_stream)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: "cpu")
    monkeypatch.setattr(torch.accelerator, "device_index", lambda _: nullcontext())
    monkeypatch.setattr(torch.accelerator, "synchronize", gpu.synchronize)
    yield gpu
    gpu.ended_all()
    assert gpu.freed_used == []
