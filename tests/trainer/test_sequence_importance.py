"""Importance weights of whole responses: the product of q/mu over one, truncated at a cap."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from async_opd.config.sections.loss import ForwardKLConfig, K1Config
from async_opd.config.sections.train import TrainConfig
from async_opd.core.samples import Sample
from async_opd.models.lm_head import LogitShape
from tests.properties import examples
from tests.trainer.models import VOCABULARY, random_sample, tiny_model
from tests.trainer.oracle import DOUBLE, Case, Identity, Tail, case, divergences, gradients, term
from trainer.batches.packing import pack
from trainer.learner import Learner
from trainer.losses import (
    K1,
    ClippedSurrogate,
    ForwardKL,
    Objective,
    ReverseKL,
    Sampled,
    build_objective,
    chunked,
    compiled,
)
from trainer.losses.base import TeacherStates
from trainer.losses.chunked import chunked_loss, log_sampled
from trainer.rank import Rank
from trainer.student.placed import PlacedStudent

V = 11
CAP = 1.1


def starts(*lengths: int) -> torch.Tensor:
    """The row at which each token's response begins."""
    counts = torch.tensor(lengths, dtype=torch.int64)
    return (counts.cumsum(0) - counts).repeat_interleave(counts)


def of(x: Case, *lengths: int) -> Case:
    return x.having(response_starts=starts(*lengths))


def weights(x: Case, temperature: float = 1.0, cap: float = CAP) -> torch.Tensor:
    """By the definition: a product over each response's tokens, in a loop."""
    ratio, first = x.ratio(temperature).detach(), x.tokens.response_starts
    return torch.stack([ratio[first == one].prod().clamp_max(cap) for one in first])


def loss_of(objective: Objective, x: Case) -> tuple[torch.Tensor, dict[str, Any]]:
    heads = {one.teacher: Identity(V) for one in x.tokens.teacher_states}
    eye = torch.eye(V, dtype=x.logits.dtype)
    return chunked_loss(x.logits, eye, None, objective, x.tokens, heads=heads)


def by_response(loss: Any, cap: float = CAP, **options: Any) -> Objective:
    return Objective(loss, importance_cap=cap, weighs_responses=True, **options)


# ── the weight ─────────────────────────────────────────────────────────────────────────────────


@examples(60)
@given(
    lengths=st.lists(st.integers(0, 5), max_size=5),
    seed=st.integers(0, 99),
    chunk=st.integers(1, 9),
    temperature=st.sampled_from([1.0, 0.6]),
    tail=st.sampled_from(["bucket", None]),
)
def test_loss_and_gradient_are_those_of_float64_however_responses_lie_in_chunks(
    lengths: list[int], seed: int, chunk: int, temperature: float, tail: Tail | None
) -> None:
    plain = of(case(seed, n=sum(lengths), v=V), *lengths)
    expected = divergences("reverse_kl", plain, tail, plain.logits)
    if sum(lengths):
        expected = weights(plain, temperature) * expected
    x = plain if tail else plain.states()
    objective = by_response(term(ReverseKL(), tail), temperature=temperature)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(chunked, "CHUNK_BYTES", {"cpu": chunk * V * 8})
        patch.setattr(compiled, "TILE_BYTES", {"cpu": V * 8})
        loss, _ = loss_of(objective, x)
    assert loss.item() == pytest.approx(expected.sum().item(), rel=1e-11, abs=1e-12)
    ours, theirs = gradients(loss, expected.sum(), by=plain.logits)
    assert torch.allclose(ours, theirs, atol=1e-11)


def test_hidden_head_and_bias_have_the_numerical_gradient() -> None:
    """All weights are at the cap, so that they are constant for the numerical one too."""
    x = of(case(n=5, v=V), 2, 3).having(
        rollout_logprobs=torch.full((5,), -30.0, dtype=DOUBLE),
        reward_weights=torch.zeros(5, dtype=DOUBLE),
    )
    torch.manual_seed(2)
    inputs = [torch.randn(m, dtype=DOUBLE).requires_grad_() for m in ((5, 3), (V, 3), (V,))]
    objective = by_response(
        term(ForwardKL(), "bucket"), 1.7, surrogate=ClippedSurrogate(0.2, 0.3), temperature=0.7
    )
    assert torch.autograd.gradcheck(lambda *t: chunked_loss(*t, objective, x.tokens)[0], inputs)


def test_all_tokens_of_a_response_have_the_weight_of_its_product() -> None:
    x = of(case(seed=4), 1, 3, 2)
    metrics = loss_of(by_response(Sampled(K1(None))), x)[1]
    expected = weights(x)
    assert torch.allclose(metrics["importance_weight"], expected, atol=1e-12)
    assert metrics["truncated"].tolist() == (weights(x, cap=1e9) > CAP).tolist()
    assert len(set(metrics["truncated"].tolist())) == 2
    assert torch.allclose(metrics["importance"], x.ratio(), atol=1e-12)


def test_ratios_that_cancel_in_a_response_are_not_truncated_token_by_token() -> None:
    x = of(case(n=2), 2)
    shift = torch.tensor([-3.0, 3.0], dtype=DOUBLE)
    x = x.having(rollout_logprobs=fresh(x) + shift)
    metrics = loss_of(by_response(Sampled(K1(None))), x)[1]
    assert torch.allclose(metrics["importance_weight"], torch.ones(2, dtype=DOUBLE))
    token = loss_of(Objective(Sampled(K1(None)), importance_cap=CAP), x)[1]
    assert token["truncated"].tolist() == [True, False]


def fresh(x: Case, temperature: float = 1.0) -> torch.Tensor:
    """log mu where the student itself has just sampled, at this temperature."""
    return log_sampled(x.logits.detach().clone(), x.tokens.targets, temperature)


@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_on_policy_every_weight_is_exactly_one(temperature: float) -> None:
    x = of(case(), 4, 2)
    x = x.having(rollout_logprobs=fresh(x, temperature))
    metrics = loss_of(by_response(Sampled(K1(None)), temperature=temperature), x)[1]
    assert metrics["importance_weight"].tolist() == [1.0] * 6
    assert not metrics["truncated"].any()


def test_weighed_responses_of_another_student_are_the_current_ones_own() -> None:
    """Σ_y mu(y) Π(q/mu) D(y) = Σ_y q(y) D(y) over all y of two tokens: prefixes are corrected."""
    x = all_of_two_tokens()
    own, stale = (one.view(-1, 2).sum(-1) for one in (fresh(x), x.tokens.rollout_logprobs))
    values = divergences("forward_kl", x, "bucket", x.logits.detach())
    wanted = (own.exp() * values.view(-1, 2).sum(-1)).sum().item()
    weighed = x.having(weights=stale.exp().repeat_interleave(2))
    loss = term(ForwardKL(), "bucket")
    assert loss_of(by_response(loss, 1e12), weighed)[0].item() == pytest.approx(wanted)
    by_token = loss_of(Objective(loss, importance_cap=1e12), weighed)[0].item()
    assert by_token != pytest.approx(wanted, rel=1e-2)


def all_of_two_tokens() -> Case:
    """Every response of two tokens; the second one's distributions depend on the first."""
    torch.manual_seed(7)
    rows, targets = [], []
    for first in range(V):
        for second in range(V):
            rows += [0, 1 + first]
            targets += [first, second]
    q, p, mu = (torch.randn(1 + V, V, dtype=DOUBLE).log_softmax(-1)[rows] for _ in range(3))
    chosen = torch.tensor(targets)
    ids = p.topk(4, dim=-1).indices
    tokens = replace(
        case(n=0).tokens,
        targets=chosen,
        rollout_logprobs=mu.gather(-1, chosen[:, None])[:, 0],
        weights=torch.ones(len(rows), dtype=DOUBLE),
        teacher_logprobs=p.gather(-1, chosen[:, None])[:, 0],
        teacher_ids=ids,
        teacher_topk_logprobs=p.gather(-1, ids),
        teacher_rest_logprobs=p.scatter(-1, ids, -torch.inf).logsumexp(-1),
        advantages=None,
        reward_weights=None,
        response_starts=starts(*[2] * (V * V)),
    )
    return Case(q.requires_grad_(), p, tokens)


def test_the_weight_is_of_the_logits_with_their_bias_and_shape() -> None:
    shape, x = LogitShape(scale=-0.5, soft_cap=0.8), of(case(seed=1), 4, 2)
    hidden, weight, bias = (torch.randn(m, dtype=DOUBLE) for m in ((6, 5), (V, 5), (V,)))
    logits = -0.5 * 0.8 * torch.tanh((hidden @ weight.t() + bias) / 0.8)
    objective = by_response(Sampled(K1(None)))
    metrics = chunked_loss(hidden, weight, bias, objective, x.tokens, shape=shape)[1]
    expected = weights(replace(x, logits=logits))
    assert 0 < metrics["truncated"].double().mean() < 1
    assert torch.allclose(metrics["importance_weight"], expected, atol=1e-12)


@pytest.mark.parametrize(("rollout", "expected"), [(-50.0, 2.0), (50.0, 0.0)])
def test_a_ratio_beyond_float32_is_the_cap_or_nothing(rollout: float, expected: float) -> None:
    x = of(case(n=4), 4).having(rollout_logprobs=torch.full((4,), rollout))
    single = replace(x, logits=x.logits.detach().float().requires_grad_())
    loss, metrics = loss_of(by_response(Sampled(K1(None)), 2.0), single)
    assert metrics["importance_weight"].tolist() == [expected] * 4
    assert loss.isfinite()


def test_a_response_of_two_teachers_chunks_is_weighed_whole() -> None:
    x = of(case(), 4, 2)
    states = (TeacherStates("t", 0, x.teacher[:4]), TeacherStates("u", 4, x.teacher[4:]))
    metrics = loss_of(by_response(term(ForwardKL(), None)), x.having(teacher_states=states))[1]
    assert torch.allclose(metrics["importance_weight"], weights(x), atol=1e-12)


def test_the_rewards_loss_keeps_the_ratio_of_each_token() -> None:
    nothing = of(case(), 4, 2).having(weights=torch.zeros(6, dtype=DOUBLE))
    surrogate = ClippedSurrogate(0.2, 0.3)
    weighed = loss_of(by_response(Sampled(K1(None)), surrogate=surrogate), nothing)[0]
    alone = loss_of(Objective(Sampled(K1(None)), surrogate=surrogate), nothing)[0]
    assert weighed.item() == alone.item() != 0


def test_tokens_that_do_not_say_whose_response_they_are_of_are_refused() -> None:
    with pytest.raises(ValueError, match=r"Tokens\.response_starts"):
        loss_of(by_response(Sampled(K1(None))), case().having(response_starts=None))


# ── what it costs ──────────────────────────────────────────────────────────────────────────────


def products(objective: Objective, x: Case, patch: pytest.MonkeyPatch) -> list[int]:
    """The buffer of each product of hidden states and head, in chunks of two rows."""
    seen, project = [], chunked.project
    patch.setattr(chunked, "CHUNK_BYTES", {"cpu": 2 * V * 8})

    def spy(*arguments: Any) -> torch.Tensor:
        out = project(*arguments)
        assert out.untyped_storage().nbytes() == 2 * V * 8
        seen.append(out.untyped_storage().data_ptr())
        return out

    patch.setattr(chunked, "project", spy)
    loss_of(objective, x)
    return seen


def test_the_pass_before_has_the_same_buffer_of_one_chunk(monkeypatch: pytest.MonkeyPatch) -> None:
    """Weights of tokens need no such pass."""
    x, by_token = of(case(), 5, 1), Objective(Sampled(K1(None)), importance_cap=CAP)
    seen = products(by_response(Sampled(K1(None))), x, monkeypatch)
    assert (len(seen), len(set(seen))) == (6, 1)
    monkeypatch.undo()
    assert len(products(by_token, x, monkeypatch)) == 3


@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_the_pass_before_makes_nothing_as_large_as_its_logits(temperature: float) -> None:
    logits, sizes = torch.randn(7, 50), []

    class Sizes(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None):
            out = func(*args, **(kwargs or {}))
            if out.untyped_storage().data_ptr() != logits.untyped_storage().data_ptr():
                sizes.append(out.numel())
            return out

    with Sizes():
        log_sampled(logits, torch.zeros(7, dtype=torch.int64), temperature)
    assert max(sizes) == 7


# ── samples, micro-batches, ranks, config ──────────────────────────────────────────────────────


def test_packed_tokens_say_whose_response_they_are_part_of() -> None:
    packed = pack([random_sample(i, size) for i, size in enumerate([2, 0, 3, 1])])
    assert packed.tokens.response_starts.tolist() == [0, 0, 2, 2, 2, 5]


CPU = torch.device("cpu")
OBJECTIVE = build_objective(ForwardKLConfig(importance="sequence", importance_cap=1.2))
TRAIN = TrainConfig(lr=1e-3, tokens_per_micro_batch=16)
LENGTHS = (5, 1, 9, 3, 0, 7, 2)


def batch() -> list[Sample]:
    """Sampled by a student near the tiny model, which is nearly uniform."""
    found = []
    for index, length in enumerate(LENGTHS):
        sample = random_sample(index, length, k=6)
        noise = 0.2 * np.random.default_rng(index).standard_normal(length) + 0.2 * (-1) ** index
        near = (noise - np.log(VOCABULARY)).astype(np.float32)
        found.append(replace(sample, rollout=replace(sample.rollout, rollout_logprobs=near)))
    return found


def rank_of(row: int = 16) -> Rank:
    train = TRAIN.model_copy(update={"tokens_per_micro_batch": row})
    return Rank(PlacedStudent(tiny_model(), OBJECTIVE, train, CPU))


def steps(
    learner: Learner, samples: Sequence[Sample] | None = None
) -> tuple[dict[str, float], list[torch.Tensor]]:
    """Metrics of two steps (the last one's), and the weights after them."""
    for _ in range(2):
        metrics = learner.train_batch(samples or batch()).metrics
    return metrics, [tensor for _, tensor in learner.named_weights()]


def assert_same(one: Any, other: Any) -> None:
    sampled = "loss/topk_overlap"  # on every 16th row of a tile
    keys = [key for key in one[0].keys() - {sampled} if key.startswith(("loss/", "importance/"))]
    assert len(keys) > 8
    for key in [*keys, "train/grad_norm"]:
        assert one[0][key] == pytest.approx(other[0][key], rel=1e-4, abs=1e-6), key
    assert all(torch.allclose(a, b, atol=1e-5) for a, b in zip(one[1], other[1], strict=True))


@pytest.mark.parametrize("row", [1, 40, 512])
def test_neither_micro_batches_nor_the_order_of_the_samples_change_a_step(row: int) -> None:
    metrics, _ = one = steps(Learner(rank_of()))
    assert 0 < metrics["importance/truncated"] < 1
    assert 0 < metrics["importance/weight"] < 1.2
    assert_same(one, steps(Learner(rank_of(row)), batch()[::-1]))


def test_the_config_names_the_weights_of_responses() -> None:
    x = of(case(), 4, 2)
    config = K1Config(kind="k1", importance="sequence", importance_cap=1.3)
    expected = loss_of(by_response(Sampled(K1(None)), 1.3), x)[0].item()
    assert loss_of(build_objective(config), x)[0].item() == expected
    by_token = loss_of(build_objective(K1Config(kind="k1", importance_cap=1.3)), x)[0].item()
    assert by_token != pytest.approx(expected)
