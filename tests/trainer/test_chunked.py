"""The kernel: chunks, precisions, what needs no gradient, and the trace of a GPU's kernels."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from async_opd.models.lm_head import LogitShape
from tests.properties import examples
from tests.trainer.oracle import DOUBLE, Case, Identity, case, divergences, term
from trainer.losses import (
    K1,
    ClippedSurrogate,
    ForwardKL,
    Objective,
    OnVocabulary,
    ReverseKL,
    Sampled,
    chunked,
    compiled,
    jsd,
)
from trainer.losses.base import TeacherStates
from trainer.losses.chunked import chunked_loss

V, H = 11, 5
OBJECTIVES = {
    "topk": Objective(term(ForwardKL(), "bucket")),
    "renormalized": Objective(term(jsd(0.3), "renormalize")),
    "full": Objective(term(ReverseKL(), None)),
    "mixed": Objective(term(jsd(0.5), None), surrogate=ClippedSurrogate(0.2, 0.3), temperature=0.7),
    "k1": Objective(Sampled(K1(None)), importance_cap=1.2),
    "sequence": Objective(Sampled(K1(None)), importance_cap=1.2, weighs_responses=True),
}


def problem(name: str, n: int = 6, dtype: torch.dtype = DOUBLE) -> tuple[Any, ...]:
    """hidden, weight, bias, and the case that the objective needs."""
    x = case(n=n, v=V)
    torch.manual_seed(1)
    hidden = torch.randn(n, H, dtype=DOUBLE).to(dtype).requires_grad_()
    weight = torch.randn(V, H, dtype=DOUBLE).to(dtype).requires_grad_()
    bias = torch.randn(V, dtype=DOUBLE).to(dtype).requires_grad_()
    full = isinstance(OBJECTIVES[name].term, OnVocabulary)
    return hidden, weight, bias, x.states() if full else x


def loss_of(name: str, hidden: Any, weight: Any, bias: Any, x: Case, **options: Any) -> Any:
    heads = {"t": Identity(V), "u": Identity(V)}
    return chunked_loss(hidden, weight, bias, OBJECTIVES[name], x.tokens, heads=heads, **options)[0]


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Chunks and tiles of so many rows."""

    def set_to(chunk: int, tile: int = 1) -> None:
        monkeypatch.setattr(chunked, "CHUNK_BYTES", {"cpu": chunk * V * 8})
        monkeypatch.setattr(compiled, "TILE_BYTES", {"cpu": tile * V * 8})

    return set_to


@pytest.mark.parametrize("name", ["topk", "renormalized", "full", "mixed"])
def test_hidden_weight_and_bias_have_the_numerical_gradient(name: str, small: Any) -> None:
    small(2)
    *tensors, x = problem(name, n=3)
    assert torch.autograd.gradcheck(lambda *t: loss_of(name, *t, x), tensors)


SHAPES = {
    "soft-capped": LogitShape(soft_cap=1.5),
    "scaled": LogitShape(scale=0.25),
    "both": LogitShape(scale=-0.5, soft_cap=0.8),
}


def shaped(logits: torch.Tensor, shape: LogitShape) -> torch.Tensor:
    """The formula itself, for autograd."""
    cap = shape.soft_cap
    return shape.scale * (logits if cap is None else cap * torch.tanh(logits / cap))


@pytest.mark.parametrize("kind", SHAPES)
@pytest.mark.parametrize("name", ["topk", "full", "mixed", "k1"])
def test_shaped_logits_have_the_gradient_of_autograd(name: str, kind: str, small: Any) -> None:
    """With a reward, and of estimates, that of their plain loss through an identity head."""
    small(2)
    hidden, weight, bias, x = problem(name)
    logits = shaped(hidden @ weight.t() + bias, SHAPES[kind])
    if name in ("mixed", "k1"):
        expected = loss_of(name, logits, torch.eye(V, dtype=DOUBLE), None, x)
    else:
        of: Any = ("reverse_kl", None) if name == "full" else ("forward_kl", "bucket")
        expected = divergences(of[0], x, of[1], logits).sum()
    loss = loss_of(name, hidden, weight, bias, x, shape=SHAPES[kind])
    assert loss.item() == pytest.approx(expected.item(), rel=1e-12)
    by = (hidden, weight, bias)
    ours, theirs = torch.autograd.grad(loss, by), torch.autograd.grad(expected, by)
    assert all(torch.allclose(a, b, atol=1e-12) for a, b in zip(ours, theirs, strict=True))


@pytest.mark.parametrize("chunk", [1, 2, 4, 100])
@pytest.mark.parametrize("name", OBJECTIVES)
def test_chunks_and_tiles_do_not_change_the_result(name: str, chunk: int, small: Any) -> None:
    *tensors, x = problem(name)
    results = []
    for rows, tile in ((100, 100), (chunk, 1)):
        small(rows, tile)
        loss = loss_of(name, *tensors, x)
        results.append([loss, *torch.autograd.grad(loss, tensors)])
    for one, other in zip(*results, strict=True):
        assert torch.allclose(one, other, atol=1e-12)


@examples(40)
@given(
    n=st.integers(0, 9),
    v=st.integers(2, 40),
    h=st.integers(1, 7),
    chunk=st.integers(1, 9),
    seed=st.integers(0, 99),
)
def test_any_shape_has_autograds_gradient(n: int, v: int, h: int, chunk: int, seed: int) -> None:
    x = case(seed, n, v, k=1 + seed % v)
    hidden, weight = (torch.randn(m, h, dtype=DOUBLE).requires_grad_() for m in (n, v))
    expected = divergences("forward_kl", x, "bucket", hidden @ weight.t()).sum()
    objective = Objective(term(ForwardKL(), "bucket"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(chunked, "CHUNK_BYTES", {"cpu": chunk * v * 8})
        loss, _ = chunked_loss(hidden, weight, None, objective, x.tokens)
    ours, theirs = (torch.autograd.grad(one, (hidden, weight)) for one in (loss, expected))
    assert all(torch.allclose(a, b, atol=1e-9) for a, b in zip(ours, theirs, strict=True))


@pytest.mark.parametrize("name", OBJECTIVES)
def test_what_is_frozen_changes_no_other_gradient(name: str) -> None:
    hidden, weight, bias, x = problem(name)
    free = torch.autograd.grad(loss_of(name, hidden, weight, bias, x), (hidden, weight))
    of_head = loss_of(name, hidden.detach(), weight, bias, x)
    of_states = loss_of(name, hidden, weight.detach(), bias.detach(), x)
    assert torch.equal(free[0], *torch.autograd.grad(of_states, hidden))
    assert torch.equal(free[1], *torch.autograd.grad(of_head, weight))


def test_nothing_is_differentiated_without_gradients() -> None:
    hidden, weight, bias, x = problem("topk")
    expected = loss_of("topk", hidden, weight, bias, x).item()
    with torch.no_grad():
        loss = loss_of("topk", hidden, weight, bias, x)
    assert not loss.requires_grad
    assert loss.item() == expected


def test_a_tied_head_gets_the_gradients_of_both_uses() -> None:
    _, weight, _, x = problem("topk")
    ids = torch.arange(6)
    expected = divergences("forward_kl", x, "bucket", weight[ids] @ weight.t()).sum()
    loss = loss_of("topk", weight[ids], weight, None, x)
    (ours,), (theirs,) = (torch.autograd.grad(one, weight) for one in (loss, expected))
    assert torch.allclose(ours, theirs, atol=1e-12)


def test_the_backward_pass_scales_and_frees_the_gradients_though_the_loss_lives_on() -> None:
    """The head's is the largest tensor of a step: 3 GB of a 32B student."""
    hidden, weight, bias, x = problem("topk")
    one, three = (
        torch.autograd.grad(f * loss_of("topk", hidden, weight, bias, x), weight) for f in (1, 3)
    )
    assert torch.allclose(3 * one[0], three[0])
    loss = loss_of("topk", hidden, weight, bias, x)
    node: Any = loss.grad_fn
    assert [g.shape for g in node.saved_tensors if g is not None]
    torch.autograd.grad(loss, weight)
    with pytest.raises(RuntimeError, match="already been freed"):
        _ = node.saved_tensors


@pytest.mark.parametrize("name", OBJECTIVES)
def test_bfloat16_products_stay_close_to_float64(name: str) -> None:
    hidden, weight, bias, x = problem(name)
    exact = torch.autograd.grad(loss_of(name, hidden, weight, bias, x), (hidden, weight))
    singles = [t.detach().float().requires_grad_() for t in (hidden, weight, bias)]
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = loss_of(name, *singles, x, compute=torch.bfloat16)
    rough = torch.autograd.grad(loss, singles[:2])
    for one, other in zip(exact, rough, strict=True):
        assert other.dtype == torch.float32
        assert (one - other).abs().max() < 0.03 * one.abs().max()


def test_a_head_in_bfloat16_gets_its_gradient_in_bfloat16() -> None:
    hidden, weight, _, x = problem("topk", dtype=torch.bfloat16)
    loss = loss_of("topk", hidden, weight, None, x)
    assert loss.dtype == torch.float32
    assert [g.dtype for g in torch.autograd.grad(loss, (hidden, weight))] == [torch.bfloat16] * 2


def test_two_teachers_in_one_batch_are_each_ones_own(small: Any) -> None:
    hidden, weight, bias, x = problem("full")
    states = (TeacherStates("t", 0, x.teacher[:4]), TeacherStates("u", 4, x.teacher[4:]))
    expected = loss_of("full", hidden, weight, bias, x).item()
    small(3)
    found = loss_of("full", hidden, weight, bias, x.having(teacher_states=states)).item()
    assert found == pytest.approx(expected, rel=1e-12)


def test_never_more_than_a_chunk_of_logits_is_alive(small: Any) -> None:
    """Counts the tensors of [rows, vocabulary] that the objective is given."""
    seen = set()

    class Spy(Objective):
        def __call__(self, logits: torch.Tensor, *rest: Any) -> Any:
            seen.add(logits.untyped_storage().data_ptr())
            assert logits.untyped_storage().nbytes() == 2 * V * 8
            return super().__call__(logits, *rest)

    small(2)
    hidden, weight, bias, x = problem("topk")
    spy = Spy(term(ForwardKL(), "bucket"))
    chunked_loss(hidden, weight, bias, spy, x.tokens)[0].backward()
    assert len(seen) == 1


@pytest.mark.slow
@pytest.mark.parametrize("name", OBJECTIVES)
def test_an_objective_is_traced_whole_and_the_trace_agrees(name: str) -> None:
    """The graphs that a GPU compiles: one graph, no break."""
    torch.compiler.reset()  # compilations of one function are counted over all tests
    *_, x = problem(name)
    eager, traced = x.logits.detach().clone(), x.logits.detach().clone()
    objective, tokens = OBJECTIVES[name], x.tokens.part(slice(0, 6))
    tokens = replace(tokens, response_log_ratios=torch.randn(6, dtype=DOUBLE))
    teachers = [
        x.teacher.clone() if isinstance(objective.term, OnVocabulary) else None for _ in range(2)
    ]
    whole = torch.compile(objective.__call__, dynamic=True, fullgraph=True, backend="aot_eager")
    first = objective(eager, tokens, teachers[0])
    second = whole(traced, tokens, teachers[1])
    assert torch.allclose(eager, traced, atol=1e-12)
    assert all(torch.allclose(first[key].double(), second[key].double()) for key in first)


@pytest.mark.long
@pytest.mark.parametrize("name", ["topk", "full"])
def test_inductors_kernels_agree_for_any_number_of_rows(name: str) -> None:
    """Its C++ kernels of a CPU, for want of a GPU's; without duck shapes, as on a GPU."""
    torch.compiler.reset()
    run = compiled.compiled(OBJECTIVES[name])
    for n in (7, 3, 12, 1):
        *_, x = problem(name, n=n)
        full = isinstance(OBJECTIVES[name].term, OnVocabulary)
        teachers = [x.teacher.clone() if full else None for _ in range(2)]
        ours, theirs = x.logits.detach().clone(), x.logits.detach().clone()
        first = OBJECTIVES[name](theirs, x.tokens, teachers[0])
        second = run(ours, x.tokens, teachers[1])
        assert torch.allclose(ours, theirs, atol=1e-12)
        assert all(torch.allclose(first[key].double(), second[key].double()) for key in first)
