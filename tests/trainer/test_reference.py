"""The log-probabilities that replicas are compared with, and how much rounding changes them."""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel

from async_opd.config.load import load_config
from async_opd.config.sections.loss import ForwardKLConfig
from async_opd.config.sections.train import TrainConfig
from async_opd.core.errors import StageError
from async_opd.weight_sync.layout import Reference, held_rows
from benchmarks.local_ranks import in_processes
from tests.engines import reference_logprobs
from tests.trainer.models import VOCABULARY, bare_stage, new_rank, random_sample, tiny_model
from trainer.build import build_rank
from trainer.learner import Learner
from trainer.losses import build_objective
from trainer.publisher import Publisher
from trainer.stage import TrainerStage
from trainer.student import reference as reference_module
from trainer.student.placed import PlacedStudent
from trainer.student.quantization import KEPT, SentMatrices, fake_quantized
from trainer.student.reference import ROUNDING, Jitter
from trainer.student.sharding import lone_mesh

CPU = torch.device("cpu")
ROWS = held_rows(VOCABULARY, 60)
QUICKSTART = Path(__file__).parents[2] / "examples" / "quickstart.yaml"


def learner(model: Any, dtype: str = "float32") -> Learner:
    train = TrainConfig(lr=1e-2, dtype=dtype, tokens_per_micro_batch=64)
    return Learner(new_rank(model, train))


def own(model: Any) -> np.ndarray:
    """Log-probabilities of the rows, one after the other, from the model itself."""
    rows = [row.ids for row in ROWS]
    tables = [reference_logprobs(model, ids[:1], ids[1:]) for ids in rows]
    found = (t[np.arange(len(t)), ids[1:]] for t, ids in zip(tables, rows, strict=True))
    return np.concatenate(list(found))


def spread(model: Any) -> Any:
    """A model whose rows are not all equally probable."""
    with torch.no_grad():
        for weight in model.parameters():
            weight.mul_(3)
    return model


def test_the_log_probabilities_are_the_models_own_also_after_a_step() -> None:
    model = spread(tiny_model())
    made = learner(model)
    before = np.concatenate(made.reference(ROWS).logprobs)
    np.testing.assert_allclose(before, own(model), atol=1e-5)
    made.train_batch([random_sample(0, 5, k=6)])
    found = np.concatenate(made.reference(ROWS).logprobs)
    np.testing.assert_allclose(found, own(model), atol=1e-5)
    assert np.abs(found - before).mean() > 1e-3


@pytest.mark.parametrize("scheme", ["int4_group32", "fp8_per_block"])
def test_they_are_those_of_the_matrices_that_the_sender_rounds(scheme: Any) -> None:
    model, sent = spread(tiny_model()), spread(tiny_model())
    rank = new_rank(model, TrainConfig())
    rank.student.sent = SentMatrices(torch.bfloat16, scheme)
    named = ((name, weight.detach().bfloat16()) for name, weight in sent.named_parameters())
    for name, weight in fake_quantized(named, scheme):
        if weight.ndim == 2 and not KEPT.search(name):
            sent.get_parameter(name).data.copy_(weight)
    found = np.concatenate(rank.student.reference(ROWS).logprobs)
    np.testing.assert_allclose(found, own(sent), atol=1e-5)
    assert np.abs(found - own(model)).mean() > 1e-3


def test_a_sharded_student_computes_with_the_same_rounded_matrices() -> None:
    """A group of a scheme may lie in several shards: each layer rounds its whole matrix."""

    def logprobs(mesh: Any) -> np.ndarray:
        rank = new_rank(spread(tiny_model()), TrainConfig(), mesh=mesh)
        rank.student.sent = SentMatrices(torch.bfloat16, "fp8_per_tensor")
        return np.concatenate(rank.student.reference(ROWS).logprobs)

    def lead(*_: Any) -> np.ndarray:
        return logprobs(lone_mesh(CPU))

    np.testing.assert_allclose(in_processes(1, lead, lead, 60), logprobs(None), atol=1e-5)


def test_no_rounded_matrix_and_no_hook_stays_behind() -> None:
    model = spread(tiny_model())
    rank = new_rank(model, TrainConfig())
    rank.student.sent = SentMatrices(torch.float32, "int2_group32")
    rank.student.reference(ROWS)
    assert all(not module._forward_hooks for module in model.modules())
    np.testing.assert_allclose(
        np.concatenate(learner(model).reference(ROWS).logprobs), own(model), atol=1e-5
    )


def test_a_rounded_matrix_outside_of_linear_layers_is_refused_by_name() -> None:
    student = torch.nn.Module()
    student.experts = torch.nn.Module()
    student.experts.down_proj = torch.nn.Parameter(torch.ones(2, 3, 3))
    with (
        pytest.raises(StageError, match=r"experts\.down_proj is not the matrix of a linear layer"),
        SentMatrices(torch.float32, "int4_group32").within(student),
    ):
        pass


def test_a_student_with_such_a_matrix_is_refused_when_it_is_built(tmp_path: Path) -> None:
    tiny = GPT2Config(vocab_size=128, n_positions=128, n_embd=16, n_layer=1, n_head=1)
    GPT2LMHeadModel(tiny).save_pretrained(tmp_path)
    values = [f"student.model={tmp_path}", "sync.fake_quantization=int4_group32"]
    with pytest.raises(StageError, match="is not the matrix of a linear layer"):
        build_rank(load_config(QUICKSTART, values), "cpu", None)


def test_temperature_and_loss_of_the_run_do_not_matter() -> None:
    model = spread(tiny_model())
    objective = build_objective(ForwardKLConfig(), temperature=0.5)
    found = PlacedStudent(model, objective, TrainConfig(), CPU).reference(ROWS)
    np.testing.assert_allclose(np.concatenate(found.logprobs), own(model), atol=1e-5)


def test_no_gradient_and_no_hook_stays_behind_and_no_random_state_changes() -> None:
    model, before = tiny_model(), torch.get_rng_state()
    first, second = (learner(model).reference(ROWS) for _ in range(2))
    assert torch.equal(torch.get_rng_state(), before)
    assert all(parameter.grad is None for parameter in model.parameters())
    assert all(not module._forward_hooks for module in model.modules())
    assert first.noise == second.noise
    assert all(map(np.array_equal, first.logprobs, second.logprobs))


def test_the_noise_is_in_proportion_to_the_relative_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """Measured with errors a quarter as large, noise per error is the same within a tenth."""
    made = learner(spread(tiny_model()))
    coarse = made.reference(ROWS).noise
    monkeypatch.setattr(reference_module, "JITTER", reference_module.JITTER / 4)
    assert made.reference(ROWS).noise == pytest.approx(coarse, rel=0.1)


def test_rounding_the_weights_to_bfloat16_changes_no_more_than_some_roundings() -> None:
    model = spread(tiny_model())
    found = learner(model).reference(ROWS)
    rounded = model.to(torch.bfloat16).float()
    distance = np.abs(own(rounded) - np.concatenate(found.logprobs)).mean()
    assert 0.05 < distance / (found.noise["text"] * ROUNDING[torch.bfloat16]) < 5


def test_the_rounding_is_that_of_the_computation() -> None:
    assert learner(tiny_model()).reference(ROWS).rounding == 2.0**-24
    assert learner(tiny_model(), "bfloat16").reference(ROWS).rounding == 2.0**-8


def test_jitter_keeps_dtype_and_zeros() -> None:
    moved = Jitter.of(CPU)(torch.tensor([0.0, 1.0], dtype=torch.bfloat16))
    assert moved.dtype == torch.bfloat16
    assert moved[0] == 0


def stage(made: Learner, rows: Any = ROWS) -> TrainerStage:
    """A training stage without a queue."""
    publisher = Publisher(made.named_weights, cast(Any, None), digests=True)
    return bare_stage(made, None, publisher, held_rows=rows)


async def test_a_snapshot_that_is_compared_has_the_reference_of_what_is_sent() -> None:
    model = spread(tiny_model())
    made = learner(model)
    meta = await stage(made).snapshot(3, compare=True)
    made.train_batch([random_sample(0, 5, k=6)])
    sent = spread(tiny_model())
    np.testing.assert_allclose(np.concatenate(meta.reference.logprobs), own(sent), atol=1e-5)
    assert len(meta.digests) == len(meta.names)


@pytest.mark.parametrize(("rows", "compare"), [(ROWS, False), ((), True)])
async def test_a_snapshot_that_is_not_compared_has_no_reference(rows: Any, compare: bool) -> None:
    meta = await stage(learner(tiny_model()), rows).snapshot(3, compare)
    assert meta.reference is None


async def test_no_weight_changes_between_the_copies_and_their_reference() -> None:
    """Both are made under the lock that a step takes."""
    made = learner(tiny_model())
    training = stage(made)
    locked: list[bool] = []
    reference = made.reference

    def noted(rows: Any) -> Reference:
        locked.append(training._weights.locked())
        return reference(rows)

    made.reference = noted
    await training.snapshot(1, compare=True)
    assert locked == [True]
