"""Activations that are computed again: the same gradients, and less memory."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from torch.distributed._tools.mem_tracker import MemTracker

from async_opd.config.device_defaults import Recomputation
from tests.trainer.models import random_sample, tiny_model
from trainer.batches.packing import pack
from trainer.layers import recompute_activations
from trainer.losses import ForwardKL, Objective, OnTopK
from trainer.student.loss_module import StudentLoss

KINDS: tuple[Recomputation, ...] = ("none", "selective", "full")


@dataclass(frozen=True)
class Seen:
    """Of one forward and backward pass: gradients, bytes of activations, matrix products."""

    gradients: list[torch.Tensor]
    activations: int
    products: int


class Products(torch.utils._python_dispatch.TorchDispatchMode):
    """Counts matrix products."""

    count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += func in (torch.ops.aten.mm.default, torch.ops.aten.addmm.default)
        return func(*args, **(kwargs or {}))


def seen(kind: Recomputation) -> Seen:
    model = tiny_model()
    if kind != "none":
        recompute_activations(model, kind)
    student = StudentLoss(model, Objective(OnTopK(ForwardKL(), "bucket", None)), {})
    packed = pack([random_sample(i, 20, k=6) for i in range(8)])
    with Products() as products:
        student(packed)[0].backward()
    gradients = [p.grad.clone() for p in model.parameters() if p.grad is not None]
    student.zero_grad(set_to_none=True)
    tracker = MemTracker()
    tracker.track_external(student)
    with tracker:
        loss, _ = student(packed)
        kept = tracker.get_tracker_snapshot("current")[torch.device("cpu")]
        loss.backward()
    return Seen(gradients, kept["Activation"], products.count)


@pytest.fixture(scope="module")
def found() -> dict[Recomputation, Seen]:
    return {kind: seen(kind) for kind in KINDS}


@pytest.mark.parametrize("kind", ["selective", "full"])
@pytest.mark.slow
def test_gradients_are_those_of_kept_ones(
    found: dict[Recomputation, Seen], kind: Recomputation
) -> None:
    for expected, gradient in zip(found["none"].gradients, found[kind].gradients, strict=True):
        assert torch.equal(gradient, expected)


def test_the_more_is_computed_again_the_less_is_kept_and_selective_keeps_products(
    found: dict[Recomputation, Seen],
) -> None:
    none, selective, full = (found[kind].activations for kind in KINDS)
    assert full < 0.5 * selective
    assert selective < 0.8 * none
    none, selective, full = (found[kind].products for kind in KINDS)
    assert none == selective < full
