"""Two races of the trainer's threads, reproduced and gone: which tensors are wrong.

The trainer's stage and publisher run as in a run; the learner's steps and NCCL are replaced. A step
reads all weights, computes for a while and writes them plus one, so that after k steps every entry
is k. Chunks go to a group that keeps copies.

    transport        vllm: vLLM's packed producer, connected as PyNccl does, which sets a new stream
                     on the thread (``vllm_streams``), as it was; own: ``rollouter.transports.nccl``
    threads          pool: all work on asyncio's pool, as it was; own: one trains, one sends
    event            none, as it was; waits: the sender waits for the end of the snapshot's copies
    wrong_trained    tensors of the trainer that are wrong after the last step: steps on different
                     streams overwrote each other
    wrong_received   tensors that were received with other values than the snapshot's
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from functools import partial
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch

from async_opd.tools.qualify.measurements.measuring import Figures, Report, Skip, finish
from async_opd.tools.qualify.measurements.vllm_streams import current_stream, packed_producer
from async_opd.waiting.deadline import gather_or_cancel
from async_opd.weight_sync.layout import Rendezvous, WeightMeta
from rollouter.transports import nccl
from rollouter.transports.nccl import NcclSender
from trainer.publisher import Publisher
from trainer.stage import TrainerStage

SIZES = {"cuda": (64, 1 << 20), "cpu": (4, 1 << 10)}
"""Tensors, and entries of each."""
VERSIONS, STEPS = 8, 2
"""Weight versions, and steps before the snapshot of each; one more runs beside its broadcast."""
BUSY_CYCLES = 50_000_000
"""Cycles of a GPU that a step computes: some 30 ms."""
BUFFER_BYTES = 16 << 20
TIMEOUT_S = 60.0
CASES = (
    ("vllm", True, True),
    ("vllm", True, False),
    ("vllm", False, True),
    ("vllm", False, False),
    ("own", False, True),
    ("own", False, False),
)
"""Transport, work on a pool, no event."""
Named = list[tuple[str, torch.Tensor]]


class Steps:
    """A learner whose weights count its steps."""

    def __init__(self, device: torch.device) -> None:
        count, entries = SIZES[device.type]
        self.device = device
        self.count = 0
        self.weights = [torch.zeros(entries, device=device) for _ in range(count)]

    def train_batch(self, samples: object, images: object = None) -> Any:
        """One step: like an optimizer's, its writes are queued when it returns."""
        read = [weight.clone() for weight in self.weights]
        float(read[0][0])  # the gradient norm: waits for this thread's stream
        if self.device.type == "cuda":
            torch.cuda._sleep(BUSY_CYCLES)  # type: ignore[no-untyped-call]
        for weight, before in zip(self.weights, read, strict=True):
            torch.add(before, 1, out=weight)
        self.count += 1
        return SimpleNamespace(metrics={}, skipped="", notes=())

    def named_weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Copies in the engines' dtype, which holds the counts exactly."""
        for index, weight in enumerate(self.weights):
            yield str(index), weight.to(torch.bfloat16, copy=True)

    def wrong(self) -> int:
        """Tensors with an entry that is not the number of steps."""
        finish(self.device)
        return _other_than(self.count, self.weights)


def _other_than(value: int, tensors: list[torch.Tensor]) -> int:
    return sum(not bool((tensor == value).all()) for tensor in tensors)


class Keeping:
    """A group whose members keep copies of the chunks, made on the stream that sends them."""

    def __init__(self) -> None:
        self.chunks: list[torch.Tensor] = []

    def broadcast(self, chunk: torch.Tensor, src: int) -> None:
        """Queues a copy."""
        self.chunks.append(chunk.clone())

    def received(self, meta: WeightMeta) -> list[torch.Tensor]:
        """The tensors in the chunks."""
        packed = torch.split(torch.cat(self.chunks), list(meta.sizes))
        return [piece.view(torch.bfloat16) for piece in packed]


class PackedSender:
    """See ``trainer.publisher.Transport``; ``group`` is replaced by each broadcast."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.group = Keeping()

    def open(self, world_size: int) -> Rendezvous:
        """Nothing: the rank is alone."""
        return Rendezvous("", 0, world_size, 1.0, BUFFER_BYTES, b"")

    def connect(self) -> None:
        """As PyNccl's first call."""
        if self._device.type == "cuda":
            current_stream()

    def close(self) -> None:
        """Nothing is open."""

    def broadcast(self, weights: Named, meta: WeightMeta) -> float:
        """As the transport did when it used vLLM's ``nccl`` backend."""
        self.group = Keeping()
        packed_producer(iter(weights), self.group, BUFFER_BYTES, self._device)
        finish(self._device)
        return 0.0


class Communicator:
    """PyNccl's, with a group that keeps copies; its init sets a stream on the calling thread."""

    def __init__(self, device: torch.device, sender: OwnSender) -> None:
        self.device = device
        self._sender = sender
        if device.type == "cuda":
            current_stream()

    def broadcast(self, chunk: torch.Tensor, src: int, stream: Any) -> None:
        """Queues the copy on the stream."""
        with torch.cuda.stream(stream):
            self._sender.group.broadcast(chunk, src)

    def destroy(self) -> None:
        """Nothing is open."""


class OwnSender(NcclSender):
    """The transport of GPUs, over the communicator above."""

    def __init__(self, device: torch.device) -> None:
        super().__init__("", TIMEOUT_S, BUFFER_BYTES)
        self._device = device
        self.group = Keeping()

    def listen(self) -> tuple[str, int, bytes]:
        """Nothing: the rank is alone."""
        return "", 0, b""

    def connect(self) -> None:
        """See NcclSender.connect."""
        with patch.object(nccl, "_communicator", lambda *_: Communicator(self._device, self)):
            super().connect()

    def broadcast(self, *what: Any) -> float:
        """See NcclSender.broadcast."""
        self.group = Keeping()
        return super().broadcast(*what)


class Pool:
    """The stage's earlier threads: asyncio's pool."""

    async def run(self, work: Callable[..., Any], /, *args: Any, **named: Any) -> Any:
        """The result of the work on any of its threads."""
        return await asyncio.to_thread(work, *args, **named)


class Hasty(Publisher):
    """The publisher as it was: it sends without waiting for its copies."""

    def send(self, group: int) -> float:
        """See Publisher.send."""
        self._copied = None
        return super().send(group)


class Batcher:
    """Endless empty batches."""

    duplicates = duplicate_tokens = 0

    async def take(self, version: int) -> Any:
        """A batch."""
        return SimpleNamespace(headers=(), samples=(), requeued=())

    async def done(self) -> None:
        """Nothing was leased."""


async def synced(learner: Any, transport: Any, *, pool: bool, hasty: bool) -> Figures:
    """Trains and syncs; counts wrong tensors."""
    kind = Hasty if hasty else Publisher
    publisher = kind(learner.named_weights, lambda: transport)
    batcher: Any = Batcher()
    stage = TrainerStage(learner, publisher, batcher, max_version_lag=None, model_dir="")
    if pool:
        stage._computing = stage._sending = Pool()  # type: ignore[assignment]
    await stage.open(0, 2, ())
    await gather_or_cancel(stage.connect(0), stage.step())  # on two threads of a pool
    wrong = 0
    for version in range(1, VERSIONS + 1):
        for _ in range(STEPS):
            await stage.step()
        expected = learner.count
        meta = await stage.snapshot(version)
        await gather_or_cancel(stage.send(0), stage.step())
        finish(learner.device)
        wrong += _other_than(expected, transport.group.received(meta))
    tensors = len(learner.weights)
    return {
        "wrong_trained": learner.wrong(),
        "of_trained": tensors,
        "wrong_received": wrong,
        "of_received": tensors * VERSIONS,
    }


def after_syncs(device: torch.device, sender: str, *, pool: bool, hasty: bool) -> Figures:
    """Wrong tensors of a new trainer. Skip for our transport without a GPU."""
    if sender == "own" and device.type != "cuda":
        raise Skip("the transport of GPUs needs CUDA's streams")
    transport = OwnSender(device) if sender == "own" else PackedSender(device)
    return asyncio.run(synced(Steps(device), transport, pool=pool, hasty=hasty))


def main(report: Report) -> None:
    """See the module."""
    device = report.device
    for sender, pool, hasty in CASES:
        report.cell(
            partial(after_syncs, device, sender, pool=pool, hasty=hasty),
            transport=sender,
            threads="pool" if pool else "own",
            event="none" if hasty else "waits",
        )
