"""The races of the trainer's threads, on streams that are as late as a GPU's may be."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator
from itertools import cycle
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import _disable_current_modes

from async_opd.tools.qualify.measurements import streams, vllm_streams
from async_opd.tools.qualify.measurements.measuring import Figures
from async_opd.weight_sync.layout import WeightMeta
from rollouter.transports import nccl
from tests.tools.qualify.late_streams import Late, LateGpu, Stream
from trainer.work_thread import WorkThread

CPU, CUDA = torch.device("cpu"), torch.device("cuda")


class Queued(streams.Steps):
    """Its tensors are on the CPU, its operations on the streams of a late GPU.

    After a snapshot it waits until it is ``sent``: a step reads a norm, and so waits for the copies
    of the snapshot, which would be complete then by chance.
    """

    def __init__(self, gpu: LateGpu, sent: threading.Event) -> None:
        super().__init__(CPU)
        self.gpu, self.sent = gpu, sent

    def train_batch(self, samples: object, images: object = None) -> Any:
        assert self.sent.wait(60)
        with Late(self.gpu):
            return super().train_batch(samples)

    def named_weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        self.sent.clear()
        with Late(self.gpu):  # the publisher's copies of what it yields are queued too
            yield from super().named_weights()


class Alternating:
    """A pool of two threads that take turns."""

    def __init__(self) -> None:
        self.threads = cycle([WorkThread("one"), WorkThread("other")])

    async def run(self, work: Callable[..., Any], /, *args: Any, **named: Any) -> Any:
        return await next(self.threads).run(work, *args, **named)


def queueing(kind: Any, gpu: LateGpu, sent: threading.Event) -> Any:
    """A sender of this kind whose operations are on the GPU's streams."""

    class Queueing(kind):  # type: ignore[misc]
        def broadcast(self, weights: streams.Named, meta: WeightMeta) -> float:
            try:
                with Late(gpu):
                    return float(super().broadcast(weights, meta))
            finally:
                sent.set()

    return Queueing(CUDA)


def buffer_at_once(_: torch.device) -> torch.Tensor:
    with _disable_current_modes():
        return torch.empty(nccl.PIECE_BYTES, dtype=torch.uint8)


@pytest.fixture
def synced(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Figures]]:
    gpu = LateGpu()
    gpu.install(monkeypatch)
    monkeypatch.setattr(streams, "Pool", Alternating)
    monkeypatch.setattr(nccl, "buffer_on", buffer_at_once)
    vllm_streams._streams.cache_clear()

    def run(kind: Any, *, pool: bool, hasty: bool) -> Figures:
        sent = threading.Event()
        sent.set()
        learner, sender = Queued(gpu, sent), queueing(kind, gpu, sent)
        return asyncio.run(streams.synced(learner, sender, pool=pool, hasty=hasty))

    yield run
    vllm_streams._streams.cache_clear()


Synced = Callable[..., Figures]


def test_steps_on_a_pool_overwrite_each_other_after_a_transport_has_set_a_stream(
    synced: Synced,
) -> None:
    assert synced(streams.PackedSender, pool=True, hasty=False)["wrong_trained"] > 0


@pytest.mark.parametrize("kind", [streams.PackedSender, streams.OwnSender])
def test_without_an_event_the_receivers_get_what_was_there_before(
    kind: Any, synced: Synced
) -> None:
    found = synced(kind, pool=False, hasty=True)
    assert found["wrong_received"] > 0
    assert found["wrong_trained"] == 0


@pytest.mark.parametrize("kind", [streams.PackedSender, streams.OwnSender])
def test_with_a_thread_for_each_and_an_event_every_tensor_is_right(
    kind: Any, synced: Synced
) -> None:
    found = synced(kind, pool=False, hasty=False)
    assert (found["wrong_trained"], found["wrong_received"]) == (0, 0)
    assert found["of_received"] == 4 * streams.VERSIONS


PIECE = 64


@pytest.mark.parametrize("size", [1, PIECE, 2 * PIECE + 1, 5 * PIECE])
def test_a_piece_is_copied_while_the_one_before_it_is_sent(
    size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    gpu = LateGpu()
    gpu.install(monkeypatch)
    monkeypatch.setattr(nccl, "PIECE_BYTES", PIECE)
    monkeypatch.setattr(nccl, "buffer_on", buffer_at_once)
    waiting = []

    class Noting(streams.Keeping):
        def broadcast(self, chunk: torch.Tensor, src: int) -> None:
            others = [one for one in gpu.streams if one is not gpu.current]
            waiting.append(sum(len(one.queued) for one in others))
            super().broadcast(chunk, src)

    sender = streams.OwnSender(CUDA)
    sender.open(1)
    sender.connect()
    sender.group = Noting()
    chunk = torch.arange(size).to(torch.uint8)
    with Late(gpu), gpu.stream(Stream(gpu)):
        sender.send(chunk, 60.0)
    last = waiting[-1]  # its own copy, which is waited for
    pieces = -(-size // PIECE)
    assert all(queued > last for queued in waiting[:-1])
    assert len(waiting) == pieces
    assert torch.equal(torch.cat(sender.group.chunks), chunk)
