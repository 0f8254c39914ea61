"""AdamW with moments in bfloat16 and in 8 bits: what it computes, learns, stores and shards."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st
from pydantic import ValidationError

from async_opd.config.sections.train import TrainConfig
from async_opd.core.errors import StageError
from async_opd.models.model_size import Moments, moment_bytes
from tests.properties import examples
from tests.trainer.models import new_rank, samples_of, tiny_model
from tests.trainer.ranks import mesh_of, on_ranks
from tests.trainer.states import restore, state_of
from trainer.learner import Learner
from trainer.optimizer import LowBitAdamW, adamw, compiled_update
from trainer.rank import Rank
from trainer.rank_group import RankSpec

torchao = pytest.importorskip("torchao.optim.adam")

LOW: tuple[Moments, ...] = ("bfloat16", "8bit")
BETAS = (0.9, 0.95)


@pytest.fixture(autouse=True)
def interpreted(monkeypatch: pytest.MonkeyPatch) -> None:
    """torchao's update as Python runs it, which takes milliseconds instead of compiling."""
    monkeypatch.setattr("trainer.optimizer.compiled_update", lambda device: UPDATE)


UPDATE = torchao.single_param_adam


def wide_model(seed: int = 0) -> Any:
    """Matrices with rows of 64 and 128, of which two ranks have unequal parts of the embedding."""
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    return tiny_model(seed, vocab_size=131, hidden_size=64, intermediate_size=128, **heads)


def train_with(moments: Moments, **changes: Any) -> TrainConfig:
    given = {"lr": 3e-3, "tokens_per_micro_batch": 64, "warmup_steps": 0, "steps": 60, **changes}
    return TrainConfig(moments=moments, **given)


def learner(moments: Moments, seed: int = 0, **changes: Any) -> Learner:
    return Learner(new_rank(wide_model(seed), train_with(moments, **changes)))


BATCH = samples_of(5, 1, 9, 3, 7, 2)


def steps_of(optimizer: torch.optim.Optimizer, parameter: Any, gradients: Any) -> None:
    for gradient in gradients:
        parameter.grad = gradient.clone()
        optimizer.step()


# ── what it computes ───────────────────────────────────────────────────────────────────────────


def test_with_bfloat16_moments_it_is_adamw_whose_moments_are_rounded() -> None:
    """The oracle computes in float64, and rounds what it keeps."""
    torch.manual_seed(0)
    start, gradients = torch.randn(8, 16), torch.randn(20, 8, 16) * torch.logspace(-4, 2, 16)
    parameter = torch.nn.Parameter(start.clone())
    groups = [{"params": [parameter], "weight_decay": 0.1}]
    steps_of(LowBitAdamW(groups, 1e-2, BETAS, "bfloat16", UPDATE), parameter, gradients)
    value, first, second = start.double(), torch.zeros(8, 16).double(), torch.zeros(8, 16).double()
    for step, gradient in enumerate(gradients.double(), 1):
        exact = BETAS[0] * first + (1 - BETAS[0]) * gradient
        square = BETAS[1] * second + (1 - BETAS[1]) * gradient**2
        scale = (square / (1 - BETAS[1] ** step)).sqrt() + 1e-8
        value = value * (1 - 1e-2 * 0.1) - 1e-2 * exact / (1 - BETAS[0] ** step) / scale
        first, second = exact.bfloat16().double(), square.bfloat16().double()
    # a moment on the border between two bfloat16 may be rounded to the other one
    assert torch.allclose(parameter.double(), value, atol=20 * 1e-2 * 2**-8)
    near = (parameter.double() - value).abs() < 1e-5
    assert near.double().mean() > 0.9


@pytest.mark.parametrize("moments", LOW)
def test_the_first_step_is_that_of_adamw_in_float32(moments: Moments) -> None:
    torch.manual_seed(0)
    start, gradient = torch.randn(64, 64), torch.randn(64, 64)
    found = []
    for kind in ("float32", moments):
        parameter = torch.nn.Parameter(start.clone())
        model = torch.nn.ParameterList([parameter])
        steps_of(adamw(model, train_with(kind, weight_decay=0.1)), parameter, [gradient])
        found.append(parameter.detach())
    assert torch.allclose(*found, atol=1e-6)


def test_moments_in_8_bits_are_within_their_rounding_of_float32() -> None:
    torch.manual_seed(0)
    gradients = torch.randn(30, 64, 64)
    found = {}
    for kind in ("float32", "8bit"):
        parameter = torch.nn.Parameter(torch.zeros(64, 64))
        optimizer = adamw(torch.nn.ParameterList([parameter]), train_with(kind))
        steps_of(optimizer, parameter, gradients)
        found[kind] = parameter.detach()
    difference = (found["8bit"] - found["float32"]).norm() / found["float32"].norm()
    assert 0 < difference < 0.05


@pytest.mark.parametrize("moments", LOW)
def test_a_parameter_without_a_gradient_keeps_its_value(moments: Moments) -> None:
    with_one, without = torch.nn.Parameter(torch.ones(64, 64)), torch.nn.Parameter(torch.ones(2))
    optimizer = adamw(torch.nn.ParameterList([with_one, without]), train_with(moments))
    steps_of(optimizer, with_one, [torch.ones(64, 64)])
    assert torch.equal(without, torch.ones(2))
    assert not torch.equal(with_one, torch.ones(64, 64))


@pytest.mark.slow
def test_compiled_it_computes_what_it_computes_interpreted() -> None:
    torch.manual_seed(0)
    start, gradients = torch.randn(64, 64), torch.randn(3, 64, 64)
    found = []
    for update in (UPDATE, compiled_update(torch.device("cpu"))):
        parameter = torch.nn.Parameter(start.clone())
        optimizer = LowBitAdamW([{"params": [parameter]}], 1e-2, BETAS, "8bit", update)
        steps_of(optimizer, parameter, gradients)
        found.append(parameter.detach())
    assert torch.allclose(*found, atol=1e-3)
    assert (found[0] - found[1]).abs().median() < 1e-6


def test_a_compiler_that_fails_is_an_error_that_says_what_to_do() -> None:
    def no_compiler(graph: Any, inputs: Any) -> Any:
        raise RuntimeError("g++ was not found")

    parameter = torch.nn.Parameter(torch.ones(64, 64))
    update = torch.compile(UPDATE, backend=no_compiler)
    optimizer = LowBitAdamW([{"params": [parameter]}], 1e-2, BETAS, "8bit", update)
    with pytest.raises(StageError, match=r"cannot be compiled.*g\+\+ was not found") as error:
        steps_of(optimizer, parameter, [torch.ones(64, 64)])
    assert "train.moments: float32" in error.value.remedy


# ── what it learns ─────────────────────────────────────────────────────────────────────────────


@pytest.fixture(scope="module")
def curves() -> dict[str, list[float]]:
    """Losses of 40 steps from the same start."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("trainer.optimizer.compiled_update", lambda device: UPDATE)
        found = {}
        for kind in ("float32", *LOW):
            student = learner(kind)
            found[kind] = [student.train_batch(BATCH).metrics["loss/total"] for _ in range(40)]
        return found


@pytest.mark.parametrize("moments", LOW)
def test_the_loss_falls_as_in_float32(curves: dict[str, list[float]], moments: Moments) -> None:
    exact, found = curves["float32"], curves[moments]
    assert exact[-1] < 0.3 * exact[0]
    assert all(abs(a - b) <= 0.05 * exact[0] for a, b in zip(exact, found, strict=True))
    assert math.isclose(found[-1], exact[-1], abs_tol=0.02 * exact[0])


# ── what it stores ─────────────────────────────────────────────────────────────────────────────


def test_in_8_bits_a_matrix_has_codes_and_scales_and_a_norm_float32() -> None:
    student = learner("8bit")
    student.train_batch(BATCH)
    state = state_of(student)
    prefix = "optimizer/model.layers.0.mlp.down_proj.weight"
    codes, scale = (state[f"{prefix}/exp_avg/{part}"] for part in ("codes", "scale"))
    assert (codes.dtype, codes.shape) == (torch.uint8, (64, 128))
    assert (scale.dtype, scale.shape) == (torch.float32, (64, 1))
    assert state["optimizer/model.norm.weight/exp_avg"].dtype == torch.float32


@pytest.mark.parametrize("moments", LOW)
def test_a_restored_learner_repeats_its_steps_bit_for_bit(moments: Moments) -> None:
    first = learner(moments)
    first.train_batch(BATCH)
    state = state_of(first)
    first.train_batch(BATCH[:3])
    second = learner(moments, seed=7)
    second.train_batch(BATCH[3:])
    restore(second, 1, state)
    assert all(torch.equal(kept, state[name]) for name, kept in state_of(second).items())
    second.train_batch(BATCH[:3])
    expected = state_of(first)
    assert all(torch.equal(found, expected[name]) for name, found in state_of(second).items())


@given(
    st.sampled_from(["float32", *LOW]),
    st.lists(st.sampled_from([1, 3, 32, 64, 96, 128, 200, 256]), min_size=1, max_size=3),
)
@examples(40)
def test_moments_take_the_bytes_that_are_planned(moments: Moments, shape: list[int]) -> None:
    assume(math.prod(shape) < 1 << 18)
    parameter = torch.nn.Parameter(torch.zeros(shape))
    groups = [{"params": [parameter]}]
    optimizer: torch.optim.Optimizer = LowBitAdamW(groups, 1e-2, BETAS, moments, UPDATE)
    steps_of(optimizer, parameter, [torch.ones(shape)])
    kept = [t for name, t in optimizer.state[parameter].items() if name != "step"]
    assert sum(t.nbytes for t in kept) == moment_bytes(moments, shape)


def test_bfloat16_moments_that_could_not_decay_are_refused() -> None:
    with pytest.raises(ValidationError, match=r"'moments' bfloat16 with 'betas' \(0\.9, 0\.999\)"):
        TrainConfig(moments="bfloat16", betas=(0.9, 0.999))
    assert TrainConfig(moments="8bit", betas=(0.9, 0.999)).moments == "8bit"


# ── what it shards ─────────────────────────────────────────────────────────────────────────────


@pytest.fixture(scope="module", params=LOW)
def moments(request: pytest.FixtureRequest) -> Moments:
    kind: Moments = request.param
    return kind


@pytest.fixture(scope="module", params=[2, 4])
def ranks(request: pytest.FixtureRequest) -> int:
    number: int = request.param
    return number


@pytest.fixture(scope="module")
def of_ranks(moments: Moments, ranks: int) -> Any:
    """Losses of three steps on several ranks; the state before the last one, and after it."""

    def steps(student: Learner) -> Any:
        losses = [student.train_batch(BATCH).metrics["loss/total"] for _ in range(2)]
        state = state_of(student)
        losses.append(student.train_batch(BATCH).metrics["loss/total"])
        last = state_of(student)
        restore(student, 2, state)
        student.train_batch(BATCH)
        again = state_of(student)
        assert all(torch.equal(again[name], last[name]) for name in last)
        return losses, state, last

    def rank_of(spec: RankSpec | None) -> Rank:
        return new_rank(wide_model(), train_with(moments), mesh=mesh_of(spec))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("trainer.optimizer.compiled_update", lambda device: UPDATE)
        return on_ranks(ranks, rank_of, steps)


@pytest.mark.slow
def test_several_ranks_take_the_steps_of_one(of_ranks: Any, moments: Moments) -> None:
    alone = learner(moments)
    expected = [alone.train_batch(BATCH).metrics["loss/total"] for _ in range(3)]
    assert expected == pytest.approx(of_ranks[0], rel=1e-3)


@pytest.mark.slow
def test_one_rank_goes_on_from_several(of_ranks: Any, ranks: int, moments: Moments) -> None:
    _, state, last = of_ranks
    alone = learner(moments, seed=7)
    restore(alone, 2, state)
    kept = state_of(alone)
    assert all(torch.equal(tensor, state[name]) for name, tensor in kept.items())
    assert state.keys() - kept.keys() == {f"rng/{rank}/cpu" for rank in range(1, ranks)}
    alone.train_batch(BATCH)
    name = "model/model.layers.1.mlp.up_proj.weight"
    assert torch.allclose(state_of(alone)[name], last[name], atol=1e-3)
