"""The work between a snapshot and its broadcast, on a device that notes the order of calls."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from async_opd.weight_sync.digests import Digests
from async_opd.weight_sync.layout import Rendezvous, WeightMeta
from trainer.publisher import Publisher


class Transport:
    """Notes when it reads the weights."""

    def __init__(self, order: list[str]) -> None:
        self.order = order

    def open(self, world_size: int) -> Rendezvous:
        return Rendezvous("host", 1, world_size, 1.0, 1, b"")

    def connect(self) -> None: ...

    def close(self) -> None: ...

    def broadcast(self, weights: list[tuple[str, torch.Tensor]], meta: WeightMeta) -> float:
        self.order.append("read")
        return 0.0


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


def publisher(order: list[str]) -> Publisher:
    def copies() -> Iterator[tuple[str, torch.Tensor]]:
        for name in "ab":
            order.append(f"copy {name}")
            yield name, torch.zeros(2)

    made = Publisher(copies, lambda: Transport(order))
    made.open(0, 2)
    made.open(1, 2, connected=(0,))
    return made


def test_an_event_lies_between_the_snapshot_and_the_send(order: list[str]) -> None:
    made = publisher(order)
    made.snapshot()
    made.send(0)
    assert order == ["copy a", "copy b", "record event 1", "wait for event 1", "read"]


def test_every_group_waits_for_the_newest_snapshot(order: list[str]) -> None:
    made = publisher(order)
    made.snapshot()
    made.snapshot()
    del order[:]
    made.send(0)
    made.send(1)
    assert order == ["wait for event 2", "read"] * 2


def test_without_a_gpu_there_is_nothing_to_wait_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "Event", None)
    order: list[str] = []
    made = publisher(order)
    made.snapshot()
    made.send(0)
    assert order == ["copy a", "copy b", "read"]


def test_a_snapshot_names_what_is_never_sent() -> None:
    given = [("a", torch.ones(2))]
    publisher = Publisher(lambda: iter(given), lambda: Transport([]), frozen=("tower",))
    assert publisher.snapshot().frozen == ("tower",)


def test_a_snapshot_has_the_digests_of_its_tensors_where_they_are_wanted() -> None:
    weights = [("a", torch.ones(2)), ("b", torch.zeros(3))]
    expected = Digests(torch)
    deque(expected.add_all(iter(weights)), maxlen=0)
    publisher = Publisher(lambda: iter(weights), lambda: Transport([]), digests=True)
    assert publisher.snapshot().digests == tuple(expected.values().values())
    assert publisher.meta.digests == publisher.snapshot().digests
    without = Publisher(lambda: iter(weights), lambda: Transport([]))
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
