"""How often a step's host waits for its device: on a pretended one, which counts."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from unittest import mock

import pytest
import torch

from async_opd.config.sections.loss import ForwardKLConfig
from async_opd.config.sections.train import TrainConfig
from tests.trainer.models import random_sample, tiny_model
from tests.world.pretended_device import Waits, device
from trainer.learner import Learner
from trainer.losses import build_objective, chunked, compiled
from trainer.rank import Rank
from trainer.student.attention import Ragged, register_kernel
from trainer.student.placed import PlacedStudent

pytestmark = pytest.mark.slow  # torch is imported once more

TRAIN = TrainConfig(lr=1e-2, tokens_per_micro_batch=8)
READS: dict[str, Callable[[torch.Tensor], object]] = {
    "a number": float,
    "a shape": torch.nonzero,
    "rows of a mask": lambda tensor: tensor[tensor > 0],
    "all numbers": torch.Tensor.cpu,
}


@pytest.fixture(scope="module")
def apart() -> Iterator[ProcessPoolExecutor]:
    """Another process: torch keeps a device that it has been given."""
    with ProcessPoolExecutor(1, get_context("spawn")) as made:
        yield made


def ragged(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, _: Ragged) -> torch.Tensor:
    """In the place of a GPU's kernel, which the host launches and does not wait for."""
    groups = query.shape[1] // key.shape[1]
    return query + torch.cat([key + value] * groups, dim=1)


def of_step(micro_batches: int, pinned: bool = True) -> list[str]:
    """The waits of a step whose samples are fresh."""
    samples = [random_sample(index, 5, k=6) for index in range(micro_batches)]
    register_kernel("packed_test", ragged)
    for sizes in (chunked.CHUNK_BYTES, compiled.TILE_BYTES):
        sizes[device().type] = sizes["cuda"]
    waits = Waits()
    with waits, mock.patch("torch.Tensor.pin_memory", waits.pin if pinned else torch.clone):
        model = tiny_model(tie_word_embeddings=False, attn_implementation="packed_test")
        learner = Learner(
            Rank(PlacedStudent(model, build_objective(ForwardKLConfig()), TRAIN, device()))
        )
        waits.found.clear()
        report = learner.train_batch(samples)
    assert report.metrics["train/micro_batches"] == micro_batches
    assert "mismatch/kl" in report.metrics
    return waits.found


def of_read(what: str) -> list[str]:
    """The waits of one of READS."""
    with (waits := Waits()):
        READS[what](torch.ones((), device=device()).reshape(1))
    return waits.found


def test_a_step_waits_at_most_three_times_and_no_micro_batch_does(
    apart: ProcessPoolExecutor,
) -> None:
    one, four = apart.map(of_step, (1, 4), timeout=300)
    assert four == one
    assert len(one) <= 3, one


def test_inputs_that_are_not_pinned_are_waited_for_in_each_micro_batch(
    apart: ProcessPoolExecutor,
) -> None:
    """The test above can fail: a copy from memory that is not pinned waits for the device."""
    found = apart.map(of_step, (1, 4), (False, False), timeout=300)
    one, four = (waits.count("_to_copy to the device") for waits in found)
    assert one > 3
    assert four == 4 * one


@pytest.mark.parametrize("what", READS)
def test_what_the_host_reads_is_counted(what: str, apart: ProcessPoolExecutor) -> None:
    assert len(apart.submit(of_read, what).result(300)) == 1
