"""Families of students: the gradient is that of the logits which the engines sample from."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any

import numpy as np
import pytest
import torch

from async_opd.config.device_defaults import Recomputation
from async_opd.config.sections.train import TrainConfig
from async_opd.core.errors import StageError
from async_opd.core.samples import Sample
from async_opd.core.scores import TopK
from tests.trainer import attention, families
from tests.trainer.models import random_sample, tiny_model
from trainer.batches.micro_batches import MicroBatch
from trainer.batches.token_weights import TokenWeight
from trainer.layers import recompute_activations, set_recomputation
from trainer.losses import ForwardKL, Objective, OnTopK
from trainer.notes import drain_notes
from trainer.rank import Rank
from trainer.student.attention import VARLEN, register, register_kernel
from trainer.student.check import LENGTHS, check_placed, check_student
from trainer.student.placed import PlacedStudent

CPU = torch.device("cpu")
pytestmark = pytest.mark.filterwarnings("ignore:.torch.jit.script")  # transformers' GPTBigCode
RANDOM = {
    "SeedOss": families.seed_oss,
    "GPTBigCode": families.gpt_bigcode,
    "Mixtral": families.mixtral,
    "PhiMoE": families.phimoe,
}
SHAPED = {
    "Gemma 2": lambda: families.gemma2(attention_cap=None),
    "Granite": families.granite,
    "Cohere": families.cohere,
}
BATCH = [random_sample(index, size, k=6) for index, size in enumerate([5, 3, 4])]


def gradient(model: Any, batch: Sequence[Sample] = BATCH) -> list[torch.Tensor]:
    """The trainer's, of the batch packed into one row, by all parameters."""
    rank = Rank(
        PlacedStudent(
            model,
            Objective(OnTopK(ForwardKL(), "ignore", None)),
            TrainConfig(max_grad_norm=1e9),
            CPU,
        )
    )
    rank.backward([MicroBatch(tuple(batch), tuple(TokenWeight() for _ in batch))])
    return [p.grad.clone() for p in model.parameters() if p.grad is not None]


def exact(model: Any, batch: Sequence[Sample] = BATCH) -> list[torch.Tensor]:
    """Autograd through the whole model, eager attention, one sample at a time."""
    model.set_attn_implementation("eager")
    loss = torch.zeros(())
    for sample in batch:
        prompt, response = sample.rollout.prompt.token_ids, sample.rollout.response_ids
        ids = torch.from_numpy(np.concatenate([prompt, response])).long()[None]
        log_q = (
            model(input_ids=ids, use_cache=False).logits[0, len(prompt) - 1 : -1].log_softmax(-1)
        )
        assert isinstance(sample.scores, TopK)
        log_p = torch.from_numpy(sample.scores.logprobs)
        log_q = log_q.gather(-1, torch.from_numpy(sample.scores.ids).long())
        loss = loss + (log_p.exp() * (log_p - log_q)).sum()
    loss.backward()
    return [p.grad.clone() for p in model.parameters() if p.grad is not None]


def distance(ours: Sequence[torch.Tensor], theirs: Sequence[torch.Tensor]) -> float:
    """Norm of the difference over the norm."""
    one, other = (torch.cat([t.flatten() for t in tensors]) for tensors in (ours, theirs))
    return float((one - other).norm() / other.norm())


@pytest.mark.parametrize("name", RANDOM | SHAPED)
def test_the_gradient_is_that_of_the_logits_of_eval_mode(name: str) -> None:
    model = (RANDOM | SHAPED)[name]()
    reference = copy.deepcopy(model)
    assert distance(gradient(model.train()), exact(reference)) < 1e-4


@pytest.mark.parametrize("kind", ["selective", "full"])
@pytest.mark.parametrize("name", RANDOM)
def test_recomputed_layers_are_those_of_eval_mode_too(name: str, kind: Recomputation) -> None:
    model = RANDOM[name]()
    reference = copy.deepcopy(model)
    recompute_activations(model, kind)
    assert distance(gradient(model), exact(reference)) < 1e-4


def test_with_auto_such_a_model_trains_without_recomputation_and_the_log_says_so() -> None:
    class Bare(torch.nn.Module):
        base_model = torch.nn.Linear(2, 2)

    drain_notes()
    set_recomputation(Bare(), TrainConfig(), "cuda")
    assert drain_notes() == (
        "Bare has no layers whose activations could be recomputed: all of them are kept",
    )
    with pytest.raises(StageError, match="Bare has no layers"):
        set_recomputation(Bare(), TrainConfig(gradient_checkpointing="full"), "cuda")


@pytest.mark.parametrize(("device", "passes"), [("cpu", 1), ("cuda", 2)])
def test_with_auto_layers_are_recomputed_on_a_gpu_only(device: str, passes: int) -> None:
    model, calls = families.granite(), []
    model.base_model.layers[0].mlp.register_forward_pre_hook(lambda *_: calls.append(1))
    set_recomputation(model, TrainConfig(), device)
    gradient(model)
    assert len(calls) == passes


@pytest.mark.parametrize("name", RANDOM)
def test_the_check_finds_what_is_random_in_the_mode_that_trains(name: str) -> None:
    with pytest.raises(StageError, match="is random while it trains"):
        check_student(RANDOM[name]().train())


@pytest.mark.parametrize("name", RANDOM | SHAPED)
def test_the_check_takes_every_family_in_eval_mode(name: str) -> None:
    check_student((RANDOM | SHAPED)[name]())


def test_the_check_leaves_modes_and_attention_as_they_were() -> None:
    model = families.granite()
    model.base_model.layers[0].training = True
    before = [module.training for module in model.modules()]
    check_student(model)
    assert [module.training for module in model.modules()] == before
    assert model.config._attn_implementation == "sdpa"


# ── what the check refuses ─────────────────────────────────────────────────────────────────────


def test_an_attention_that_leaves_out_a_soft_cap_is_refused() -> None:
    """transformers' sdpa ignores attn_logit_softcapping."""
    model = families.gemma2()
    assert model.config._attn_implementation == "sdpa"
    with pytest.raises(StageError, match="Gemma2ForCausalLM"):
        check_student(model)
    model.set_attn_implementation("eager")
    check_student(model)


def test_chunked_attention_is_refused_by_name() -> None:
    with pytest.raises(StageError, match="Llama4ForCausalLM"):
        check_student(families.llama4())


def test_masks_that_ignore_positions_are_refused() -> None:
    """transformers makes gpt-oss's without positions: packed samples would see each other."""
    with pytest.raises(StageError, match="packed logits of GptOssForCausalLM differ"):
        check_student(families.gpt_oss())


def sharp(error: float) -> Any:
    """Logits around 30, of which the model's own are larger by ``error`` nats at most."""
    model = families.made("Granite", logits_scaling=0.02)
    ids = torch.arange(1, 8)[None]
    with torch.no_grad():
        largest = float(model(ids, use_cache=False).logits.abs().max())
    model.config.logits_scaling = 0.02 * largest / 30
    inner: Callable[..., Any] = model.forward

    def forward(**arguments: Any) -> Any:
        out = inner(**arguments)
        out.logits = out.logits * (1 + error / 30)
        return out

    model.forward = forward
    return model


def half_rank(model: Any) -> Rank:
    """A rank that trains in bfloat16."""
    objective = Objective(OnTopK(ForwardKL(), "ignore", None))
    return Rank(PlacedStudent(model, objective, TrainConfig(dtype="bfloat16"), CPU))


def test_half_a_nat_is_seen_at_large_logits() -> None:
    model = sharp(0.0)
    check_placed(half_rank(model).student, check_student(model))
    with pytest.raises(StageError, match="Granite"):
        check_student(sharp(0.5))


def test_what_goes_wrong_only_in_the_precision_of_training_is_seen() -> None:
    model = families.granite()

    def leak(module: Any, given: Any, out: Any) -> None:
        """A kernel whose packed sequences see each other."""
        if torch.is_autocast_enabled("cpu") and out.last_hidden_state.shape[1] > sum(LENGTHS):
            out.last_hidden_state = out.last_hidden_state.roll(1, dims=1)

    rank = half_rank(model)
    check_placed(rank.student, check_student(model))
    model.base_model.register_forward_hook(leak)
    with pytest.raises(StageError, match="in the precision and with the attention of training"):
        check_placed(rank.student, check_student(model))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_kernel_that_differs_from_the_eager_definition_is_refused(dtype: Any) -> None:
    """It computes a sequence alone as it does in a row: only the definition shows the fault."""
    objective = Objective(OnTopK(ForwardKL(), "ignore", None))
    model = families.mistral(window=64)
    rank = Rank(PlacedStudent(model, objective, TrainConfig(dtype=dtype), CPU))
    exact = check_student(model)
    for kernel, good in ((attention.reference, True), (attention.double_scale, False)):
        register_kernel("packed_test", kernel)
        model.set_attn_implementation("packed_test")
        with nullcontext() if good else pytest.raises(StageError, match="MistralForCausalLM"):
            check_placed(rank.student, exact)


def test_a_student_whose_attention_needs_a_gpu_is_checked_on_the_cpu_too() -> None:
    """Before sharding the check compares eager attention."""
    register()
    model = tiny_model()
    model.set_attn_implementation(VARLEN)
    check_student(model, 64)
    assert model.config._attn_implementation == VARLEN
