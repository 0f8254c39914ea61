"""Snapshots in host memory: in the chunks that are sent, a layer at a time, in the same memory."""

from __future__ import annotations

import threading
import weakref
from collections import deque
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from async_opd.weight_sync.digests import Digests
from async_opd.weight_sync.layout import Rendezvous, WeightMeta, chunk_plan
from rollouter.transports.chunks import packed
from tests.trainer.models import tiny_model
from tests.trainer.test_named_weights import mixture
from trainer.offload import HostBuffers
from trainer.publisher import Publisher
from trainer.student import named_weights as naming
from trainer.student.named_weights import named_weights

DTYPES = [torch.bfloat16, torch.float32, torch.uint8]
Named = list[tuple[str, torch.Tensor]]


def bytes_of(tensors: list[torch.Tensor]) -> bytes:
    return b"".join(t.contiguous().view(-1).view(torch.uint8).numpy().tobytes() for t in tensors)


@given(
    st.lists(st.tuples(st.integers(1, 9), st.sampled_from(DTYPES)), min_size=1, max_size=9),
    st.integers(1, 40),
)
def test_chunks_are_sent_as_they_lie_in_the_buffers(sizes: Any, chunk_bytes: int) -> None:
    """Of every dtype, although a float32 tensor may lie behind an odd number of bytes."""
    tensors = [torch.arange(1, 1 + size).to(dtype) for size, dtype in sizes]
    buffers = HostBuffers(chunk_bytes)
    copies = [("", buffers.copy(tensor)) for tensor in tensors]
    plan = chunk_plan([tensor.nbytes for tensor in tensors], chunk_bytes)
    for chunk in plan:
        sent = packed(copies, chunk)
        assert bytes_of([sent]) == bytes_of([tensors[index] for index in chunk])
        assert sent.data_ptr() == copies[chunk.start][1].data_ptr()


def test_tensors_of_several_places_are_packed_and_uncopied_ones_the_models_own() -> None:
    weights = [("a", torch.ones(2)), ("b", torch.zeros(3))]
    assert bytes_of([packed(weights, range(2))]) == bytes_of([w for _, w in weights])
    model = tiny_model()
    own = {p.data_ptr() for p in model.parameters()}
    assert all(w.data_ptr() in own for _, w in named_weights(model, torch.float32, copied=False))
    assert not any(w.data_ptr() in own for _, w in named_weights(model, torch.float32))


class Transport:
    """Keeps where the weights of each broadcast lie, notes its reads and calls ``during``."""

    def __init__(self, order: list[str] | None = None) -> None:
        self.order = [] if order is None else order
        self.places: list[list[int]] = []
        self.during: Any = lambda weights: None

    def open(self, world_size: int) -> Rendezvous:
        return Rendezvous("host", 1, world_size, 1.0, 1, b"")

    def connect(self) -> None: ...

    def close(self) -> None: ...

    def broadcast(self, weights: Named, meta: WeightMeta) -> float:
        self.order.append("read")
        self.places.append([weight.data_ptr() for _, weight in weights])
        self.during(weights)
        return 0.0


@pytest.fixture
def value() -> list[float]:
    return [1.0]


@pytest.fixture
def transport() -> Transport:
    return Transport()


@pytest.fixture
def publisher(value: list[float], transport: Transport) -> Publisher:
    def source() -> Iterator[tuple[str, torch.Tensor]]:
        yield from ((name, torch.full((5,), value[0])) for name in "abc")

    made = Publisher(source, lambda: transport, chunk_bytes=48)
    made.open(0, 2)
    return made


def test_snapshots_share_the_first_ones_memory(publisher: Publisher, transport: Transport) -> None:
    for _ in range(3):
        publisher.snapshot()
        publisher.send(0)
    assert transport.places[0] == transport.places[1] == transport.places[2]
    a, b, c = transport.places[0]
    assert b == a + 20
    assert c != b + 20  # in the next chunk


def test_a_snapshot_waits_for_the_broadcast_of_the_one_before(
    publisher: Publisher, transport: Transport, value: list[float]
) -> None:
    seen, later = [], threading.Thread(target=publisher.snapshot)

    def during(weights: Named) -> None:
        value[0] = 2.0
        later.start()
        later.join(0.1)
        seen.extend([float(weight[0]) for _, weight in weights])

    publisher.snapshot()
    transport.during = during
    publisher.send(0)
    later.join(30)
    assert seen == [1.0, 1.0, 1.0]
    transport.during = lambda weights: seen.append(float(weights[0][1][0]))
    publisher.send(0)
    assert seen[3] == 2.0


def test_what_a_broken_off_broadcast_may_still_read_is_not_written_again(
    publisher: Publisher, transport: Transport, value: list[float]
) -> None:
    """A collective that times out ends for its caller only: its threads go on with the memory."""
    kept: list[torch.Tensor] = []

    def during(weights: Named) -> None:
        kept.extend(weight for _, weight in weights)
        raise RuntimeError("timed out")

    publisher.snapshot()
    transport.during = during
    with pytest.raises(RuntimeError, match="timed out"):
        publisher.send(0)
    value[0] = 2.0
    publisher.snapshot()
    assert [float(weight[0]) for weight in kept] == [1.0, 1.0, 1.0]


@pytest.mark.parametrize("build", [tiny_model, mixture])
def test_one_layers_weights_exist_at_a_time(build: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    alive: list[weakref.ref[torch.Tensor]] = []
    most = [0]

    def full(tensor: torch.Tensor, dtype: Any, copied: bool) -> torch.Tensor:
        made = tensor.clone()
        alive.append(weakref.ref(made))
        most[0] = max(most[0], sum(one() is not None for one in alive))
        return made

    monkeypatch.setattr(naming, "_full", full)
    model = build()
    layer = len(list(model.model.layers[0].parameters()))
    count = sum(1 for _ in named_weights(model, torch.float32, copied=False))
    assert count >= len(alive) > layer
    assert most[0] <= layer + 1  # the last tensor of the layer before may still be in use


# ── on a device that notes the order of calls ──────────────────────────────────────────────────


@pytest.fixture
def order(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The calls of a GPU, in order: its events come after what was queued before them."""
    order: list[str] = []

    class Event:
        def __init__(self, **_: Any) -> None:
            self.name = f"event {sum(call.startswith('record') for call in order) + 1}"

        def record(self) -> None:
            order.append(f"record {self.name}")

        def synchronize(self) -> None:
            order.append(f"wait for {self.name}")

    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "Event", Event)
    return order


def ordered(order: list[str]) -> Publisher:
    def copies() -> Iterator[tuple[str, torch.Tensor]]:
        for name in "ab":
            order.append(f"copy {name}")
            yield name, torch.zeros(2)

    made = Publisher(copies, lambda: Transport(order))
    made.open(0, 2)
    made.open(1, 2, connected=(0,))
    return made


def test_an_event_lies_before_each_send(order: list[str]) -> None:
    made = ordered(order)
    made.snapshot()
    made.send(0)
    assert order == ["copy a", "copy b", "record event 1", "wait for event 1", "read"]
    made.snapshot()
    del order[:]
    made.send(0)
    made.send(1)
    assert order == ["wait for event 2", "read"] * 2


def test_without_a_gpu_there_is_nothing_to_wait_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "Event", None)
    order: list[str] = []
    made = ordered(order)
    made.snapshot()
    made.send(0)
    assert order == ["copy a", "copy b", "read"]


def test_a_snapshot_names_what_is_never_sent() -> None:
    given = [("a", torch.ones(2))]
    publisher = Publisher(lambda: iter(given), lambda: Transport(), frozen=("tower",))
    assert publisher.snapshot().frozen == ("tower",)


def test_a_snapshot_has_the_digests_of_its_tensors_where_they_are_wanted() -> None:
    weights = [("a", torch.ones(2)), ("b", torch.zeros(3))]
    expected = Digests(torch)
    deque(expected.add_all(iter(weights)), maxlen=0)
    publisher = Publisher(lambda: iter(weights), lambda: Transport(), digests=True)
    assert publisher.snapshot().digests == tuple(expected.values().values())
    assert publisher.meta.digests == publisher.snapshot().digests
    without = Publisher(lambda: iter(weights), lambda: Transport())
    assert without.snapshot().digests == ()


def test_a_snapshot_has_the_digests_of_what_engines_make_of_its_tensors() -> None:
    def halves(name: str, tensor: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
        yield f"{name}_half", tensor / 2

    made = Publisher(
        lambda: iter([("w", torch.ones(2))]), lambda: Transport([]), digests=True, quantize=halves
    )
    expected = Digests(torch)
    expected.add("quantized w_half", torch.ones(2) / 2)
    assert made.snapshot().quantized == expected.values()
