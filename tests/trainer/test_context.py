"""Ranks that share rows compute the student's own logits, whatever its attention, or refuse it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import Mock, patch

import numpy as np
import pytest
import torch

from async_opd.config.sections.train import TrainConfig
from async_opd.core.errors import StageError
from tests.trainer import families
from tests.trainer.models import new_rank, tiny_model
from tests.trainer.processes import spread
from trainer.batches.packing import Row
from trainer.context import Context
from trainer.rank_group import RankSpec
from trainer.student.attention_choice import platform_of
from trainer.student.check import check_placed, check_student
from trainer.student.loading import pin_rotary, set_attention
from trainer.student.placed import PlacedStudent
from trainer.student.sharding import join_mesh

pytestmark = pytest.mark.slow


def pinned() -> Any:
    made = families.phi3()
    pin_rotary(made, 128)
    return made


RANKS = 2
CPU = torch.device("cpu")
STUDENTS: dict[str, Callable[[], Any]] = {
    "grouped queries": tiny_model,
    "sliding windows": lambda: families.mistral(3),
    "windows in some layers": families.gemma3,
    "wider heads without a window": families.gemma4,
    "soft caps": families.gemma2,
    "latent attention": families.deepseek,
    "long rope": pinned,
    "heads that do not divide": lambda: families.made("Qwen3", num_attention_heads=3, head_dim=16),
    "mixture": families.mixtral,
}
REFUSED: dict[str, tuple[Callable[[], Any], str]] = {
    "sinks": (families.gpt_oss, "does not know s_aux"),
    "ALiBi": (families.bloom, "does not call transformers' attention interface"),
    "mamba": (families.mamba, "does not call transformers' attention interface"),
    "linear attention": (families.qwen3_next, "layers of kind linear_attention"),
}
ROW = Row.of(*[[np.arange(n) for n in (9, 3, 1, 6)]] * 2)
TRAIN = TrainConfig(ranks=RANKS, context_parallel=RANKS, dtype="float32")


def placed(made: Any, mesh: Any = None, **settings: Any) -> PlacedStudent:
    train = TRAIN.model_copy(update=settings if mesh else {"context_parallel": 1, **settings})
    return new_rank(made, train, mesh=mesh).student


def shared(make: Callable[[], Any], mesh: Any, **settings: Any) -> PlacedStudent:
    """A student as ``build_rank`` places it; StageError from its checks."""
    made = make()
    set_attention(made, "auto", platform_of(CPU, False), across=True)
    exact = check_student(made)
    sharing = placed(made, mesh, **settings)
    check_placed(sharing, exact)
    return sharing


def on_ranks(rank: int) -> Any:
    """Logits of a row by student, and of one in bfloat16."""
    from torch.distributed.device_mesh import init_device_mesh

    mesh = init_device_mesh("cpu", (RANKS,))
    found = {name: shared(make, mesh).logits(ROW) for name, make in STUDENTS.items()}
    return found | {"bfloat16": shared(tiny_model, mesh, dtype="bfloat16").logits(ROW)}


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, torch.Tensor]]:
    return spread(RANKS, on_ranks, tmp_path_factory.mktemp("context"))


@pytest.mark.parametrize("name", STUDENTS)
def test_every_rank_has_the_logits_of_one_rank_for_the_whole_row(found: Any, name: str) -> None:
    alone = STUDENTS[name]()
    set_attention(alone, "auto", platform_of(CPU, False))
    expected = placed(alone).logits(ROW)
    for logits in (seen[name] for seen in found):
        assert logits.shape == expected.shape
        assert torch.allclose(logits, expected, atol=1e-4 * float(expected.abs().max()))


def test_in_bfloat16_only_rounding_differs(found: Any) -> None:
    expected = placed(tiny_model(), dtype="bfloat16").logits(ROW)
    assert float((found[0]["bfloat16"] - expected).abs().max()) < 0.1
    assert torch.equal(found[0]["bfloat16"], found[1]["bfloat16"])


def bounds(rank: int) -> list[float]:
    """Seconds that bound a collective: of a context's group, and of a mesh's two dimensions."""
    context = Context.join(RANKS, 7.0)
    spec = RankSpec(rank, RANKS, "", 0, 5.0, 5.0, b"")
    joined = patch.multiple("torch.distributed", init_process_group=Mock(), TCPStore=Mock())
    with joined, patch("trainer.student.sharding.all_know_secret", return_value=True):
        mesh = join_mesh(spec, CPU, replicate=RANKS)
    groups = [context.group, *mesh.get_all_groups()]
    return [group._get_backend(CPU).options._timeout.total_seconds() for group in groups]


def test_the_groups_of_each_dimension_have_the_bound_of_collectives(tmp_path: Path) -> None:
    assert spread(RANKS, bounds, tmp_path) == [[7.0, 5.0, 5.0]] * RANKS


@pytest.mark.parametrize("name", REFUSED)
def test_what_ranks_cannot_share_is_refused_before_they_start(name: str) -> None:
    make, reason = REFUSED[name]
    with pytest.raises(StageError, match=reason):
        set_attention(make(), "auto", platform_of(CPU, False), across=True)
