"""Chunks over NCCL: the transport of GPUs. Not yet run on a GPU.

    trainer: piece n on a separate stream ──broadcast──► receive and load on the worker's stream
             piece n + 1 ──copy to the GPU, on another──► the other of two buffers

Members connect by NCCL's unique id, which they receive over Ray, and by no store: vLLM's store
accepts every connection and unpickles its content. NCCL refuses a connection without the 64 random
bits of the id.

NCCL has no time-out: ``NcclGroup`` bounds what it does. docs/adr/0012-nccl-chunks.md says why
vLLM's own ``nccl`` backend is not used.
"""

from __future__ import annotations

import sys
import threading
from concurrent.futures import Future
from functools import partial
from itertools import cycle
from types import ModuleType
from typing import TYPE_CHECKING, Any

from async_opd.core.errors import WeightSyncError
from async_opd.weight_sync.layout import Rendezvous
from rollouter.transports import chunks

if TYPE_CHECKING:
    import torch

DEVICES = ("cuda",)
PIECE_BYTES = 32 << 20
"""Of a chunk, which are broadcast at a time: a sender keeps two of them on the trainer's GPU."""
ENTERING_S = 1.0
"""Seconds within which a thread that has seen that nothing is aborted has called NCCL."""


class NcclGroup:
    """vLLM's PyNcclCommunicator, with bounds: longer calls are aborted from another thread.

    An abort ends a broadcast on the GPU as if it had succeeded, and makes vLLM's later ones do
    nothing: this class raises an error in both cases.
    """

    def __init__(self, communicator: Any) -> None:
        self.device: torch.device = communicator.device
        self._communicator = communicator
        self._aborted = False
        self._entering = threading.Lock()  # held while a broadcast is given to NCCL
        self._destroying = threading.Lock()
        self._destroyed = False

    @classmethod
    def joined(cls, at: Rendezvous, rank: int) -> NcclGroup:
        """Joins as ``rank``, on the current GPU. WeightSyncError if others do not in time."""
        import torch

        join = partial(_communicator, at.secret, rank, at.world_size, torch.cuda.current_device())
        made: Future[Any] = Future()
        # NCCL's initialization cannot be ended: a thread that waits for a dead member is left
        # behind. And it sets another CUDA stream on its thread (vllm.utils.torch_utils:
        # current_stream), for good.
        threading.Thread(target=_join, args=(join, made), name="join nccl", daemon=True).start()
        try:
            return cls(made.result(at.timeout_s))
        except TimeoutError as error:
            if not made.cancel():
                return cls(made.result())
            cause = f"not all {at.world_size} ranks joined the group within {at.timeout_s:g} s"
            remedy = "raise sync.timeout_s, or see which replica died or hangs"
            raise WeightSyncError("weight sync", cause, remedy) from error

    def broadcast(self, chunk: torch.Tensor, timeout_s: float) -> None:
        """Rank 0's chunk to all others, on the current stream; it is there when this returns.

        BrokenOff after the bound, and ever after.
        """
        import torch

        stream = torch.cuda.current_stream()
        watchdog = threading.Timer(timeout_s, self.close)
        watchdog.daemon = True
        watchdog.start()
        try:
            with self._entering:
                if not self._aborted:
                    self._communicator.broadcast(chunk, 0, stream)
            stream.synchronize()
        except Exception as error:
            if self._aborted:  # NCCL's words for that differ
                raise chunks.BrokenOff("NCCL was aborted") from error
            raise
        finally:
            watchdog.cancel()
        if self._aborted:
            raise chunks.BrokenOff("NCCL was aborted")

    def close(self) -> None:
        """Aborts what is under way, and frees the communicator; returns when that has ended.

        A second call, of any thread, only waits for the first: vLLM's ``destroy`` would abort again
        a communicator that NCCL is freeing. ``destroy`` itself takes 5 s at most.
        """
        self._aborted = True
        with self._destroying:
            if not self._destroyed:
                self._destroyed = True
                self._destroy()

    def _destroy(self) -> None:
        """Aborts at once, but for a thread that is about to call NCCL: it would use freed memory.

        A thread that is not back after ``ENTERING_S`` waits within NCCL, and an abort ends that.
        """
        entering = not self._entering.acquire(timeout=ENTERING_S)
        try:
            self._communicator.destroy()
        finally:
            if not entering:
                self._entering.release()


class NcclSender(chunks.Sender):
    """Sends beside the training steps, on a separate stream."""

    _at: Rendezvous | None = None
    _group: NcclGroup | None = None
    _stream: Any = None
    _copying: Any = None
    _buffers: tuple[torch.Tensor, ...] = ()

    def open(self, world_size: int) -> Rendezvous:
        """See Sender.open."""
        self._at = super().open(world_size)
        return self._at

    def listen(self) -> tuple[str, int, bytes]:
        """Makes the group's unique id; NCCL listens from now on, where NCCL_SOCKET_IFNAME says.

        It is the loopback in a local run, else see ``cluster.network.name_interface``.
        """
        keep_inductor_config()
        from vllm.distributed.device_communicators.pynccl_wrapper import NCCLLibrary

        return "", 0, bytes(NCCLLibrary().ncclGetUniqueId().internal)

    def connect(self) -> None:
        """Joins as rank 0, on the current GPU."""
        assert self._at is not None, "opened first"
        self._group = NcclGroup.joined(self._at, 0)

    def send(self, chunk: torch.Tensor, timeout_s: float) -> None:
        """A broadcast of each piece; the next is copied to the GPU meanwhile.

        AssertionError before ``connect``.
        """
        import torch

        assert self._group is not None, "connected first"
        left, sending = chunks.SecondsLeft(timeout_s), torch.cuda.current_stream()
        copying = self._copying = self._copying or torch.cuda.Stream()  # type: ignore[no-untyped-call]
        device = self._group.device
        self._buffers = self._buffers or (buffer_on(device), buffer_on(device))
        copying.wait_stream(sending)  # which may still write the chunk, or read the buffers' memory
        pieces, buffers = iter(torch.split(chunk, PIECE_BYTES)), cycle(self._buffers)
        coming: torch.Tensor | None = copied(next(pieces), next(buffers), copying)
        while coming is not None:
            ready, piece = coming, next(pieces, None)
            sending.wait_stream(copying)  # for the copies that are queued now
            # The other buffer is free: its broadcast was complete when it returned.
            coming = None if piece is None else copied(piece, next(buffers), copying)
            self._group.broadcast(ready, left())

    def broadcast(self, *what: Any) -> float:
        """See Sender.broadcast; the default stream is that of the training steps."""
        import torch

        self._stream = self._stream or torch.cuda.Stream()  # type: ignore[no-untyped-call]
        with torch.cuda.stream(self._stream):
            return super().broadcast(*what)

    def close(self) -> None:
        """See Sender.close."""
        if self._group is not None:
            self._group.close()
        if self._copying is not None:
            self._copying.synchronize()  # it may still write a buffer, if a broadcast has failed
        self._buffers = ()


class NcclReceiver(chunks.Receiver):
    """Receives on the GPU and the stream of the worker, which loads on the same stream."""

    staged = False

    def __init__(self, at: Rendezvous, rank: int) -> None:
        self._group = NcclGroup.joined(at, rank)

    def receive(self, nbytes: int, timeout_s: float) -> torch.Tensor:
        """See Receiver.receive."""
        import torch

        chunk = torch.empty(nbytes, dtype=torch.uint8, device=self._group.device)
        left = chunks.SecondsLeft(timeout_s)
        for piece in torch.split(chunk, PIECE_BYTES):
            self._group.broadcast(piece, left())
        return chunk

    def close(self) -> None:
        """See Receiver.close."""
        self._group.close()


def buffer_on(device: torch.device) -> torch.Tensor:
    """Room for a piece."""
    import torch

    return torch.empty(PIECE_BYTES, dtype=torch.uint8, device=device)


def copied(piece: torch.Tensor, buffer: torch.Tensor, stream: Any) -> torch.Tensor:
    """The piece in the buffer, once the stream is there."""
    import torch

    with torch.cuda.stream(stream):
        return buffer[: len(piece)].copy_(piece, non_blocking=True)


def keep_inductor_config() -> None:
    """Keeps vLLM's changes of torch's compiler out of a process that trains.

    ``import vllm`` runs ``vllm.env_override``, which replaces parts of Inductor and gives it one
    thread. Communicators need none of that. In an engine, which has imported vllm, nothing changes.
    """
    if "vllm" not in sys.modules:
        sys.modules["vllm.env_override"] = ModuleType("vllm.env_override")


def _join(join: Any, made: Future[Any]) -> None:
    try:
        communicator = join()
    except BaseException as error:
        if made.set_running_or_notify_cancel():
            made.set_exception(error)
    else:
        if made.set_running_or_notify_cancel():
            made.set_result(communicator)
        else:  # no caller waits any more
            communicator.destroy()


def _communicator(unique_id: bytes, rank: int, size: int, device: int) -> Any:
    """A communicator of vLLM without its first collective, which could not be aborted.

    The first broadcast connects the members instead.
    """
    from vllm.distributed.device_communicators.pynccl import PyNcclCommunicator
    from vllm.utils.nccl import unpinned_nccl_env

    class Communicator(PyNcclCommunicator):
        def all_reduce(self, in_tensor: Any, *_: Any, **__: Any) -> Any:
            return in_tensor

    with unpinned_nccl_env():
        return Communicator.from_unique_id_bytes(unique_id, rank, size, device)


sender, receiver = NcclSender, NcclReceiver
