"""Scores of response rows, as an engine's steps come by: against float64."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from async_opd.core.samples import Rollout
from teachers import rows as rows_module
from teachers.rows import Chunk, RowRequest, RowScores, logprobs_of
from tests.sequences import Parts, parts, sampled_positions, sequence

VOCABULARY, HIDDEN, K = 11, 4, 3
HEAD = torch.randn(VOCABULARY, HIDDEN, generator=torch.Generator().manual_seed(0))


def scorer() -> RowScores:
    return RowScores(lambda states: states @ HEAD.to(states.dtype).T, VOCABULARY)


def states(tokens: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(tokens, HIDDEN, generator=torch.Generator().manual_seed(seed))


def table(hidden: torch.Tensor) -> torch.Tensor:
    return (hidden.double() @ HEAD.double().T).log_softmax(-1)


def wanted(start: int, ids: np.ndarray, top_k: int = 0) -> RowRequest:
    return RowRequest(
        ((start, start + len(ids)),), ids.astype(np.int32).tobytes(), ids.shape[1], top_k
    )


def tempered(ids: np.ndarray, temperature: float) -> RowRequest:
    return replace(wanted(0, ids, K), temperature=temperature)


def answer(asked: RowRequest) -> torch.Tensor:
    """The result of one step with the request's rows alone."""
    scores = scorer()
    scores.add("r", asked)
    return scores.step(states(asked.rows), [Chunk("r", 0, asked.rows, 0)])["r"]


def ids_of(count: int, columns: int = 2) -> np.ndarray:
    return np.random.default_rng(count).integers(0, VOCABULARY, (count, columns))


def numbers(found: torch.Tensor, columns: int, top_k: int = 0) -> Any:
    """Log-probabilities without that of the rest, which comes with a support."""
    return logprobs_of(found.numpy(), top_k)[:, : columns + top_k]


def rest_of(found: torch.Tensor, top_k: int = 0) -> Any:
    """The logarithm of the mass outside of the support."""
    return logprobs_of(found.numpy(), top_k)[:, -1]


@settings(deadline=None)
@given(
    prompt=st.integers(1, 5),
    response=st.integers(1, 6),
    cuts=st.sets(st.integers(1, 9)),
    budget=st.integers(1, 4),
)
def test_however_a_prompt_is_cut_its_response_rows_have_the_log_probabilities_of_the_head(
    prompt: int, response: int, cuts: set[int], budget: int
) -> None:
    hidden, ids, scores = states(prompt + response - 1), ids_of(response), scorer()
    scores.add("r", wanted(prompt - 1, ids, K))
    edges = sorted({0, len(hidden), *(cut for cut in cuts if cut < len(hidden))})
    answers: list[dict[str, torch.Tensor]] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(rows_module.CHUNK_BYTES, "cpu", budget * 4 * VOCABULARY)
        for start, end in itertools.pairwise(edges):
            answers.append(scores.step(hidden[start:end], [Chunk("r", start, end, 0)]))
    assert [list(answer) for answer in answers] == [[]] * (len(answers) - 1) + [["r"]]
    found = answers[-1]["r"]
    full = table(hidden[prompt - 1 :])
    expected = torch.cat([full.gather(1, torch.from_numpy(ids)), full.topk(K).values], 1)
    np.testing.assert_allclose(numbers(found, 2, K), expected, atol=1e-5)
    np.testing.assert_array_equal(found[:, 2 + K + 1 :], full.topk(K).indices)
    rest = full.scatter(1, full.topk(K).indices, -torch.inf).logsumexp(1)
    np.testing.assert_allclose(rest_of(found, K), rest, atol=1e-5)


def asked_of(rollout: Rollout, kind: str) -> RowRequest:
    """The sampled tokens and a given support, the best beside the sampled, or the states."""
    if kind == "states":
        return RowRequest(rollout.rows)
    sampled = rollout.response_ids[:, None]
    ids = np.hstack([sampled, rollout.topk_ids]) if kind == "given" else sampled
    return RowRequest(rollout.rows, ids.tobytes(), ids.shape[1], 0 if kind == "given" else K)


def in_steps(scores: RowScores, hidden: torch.Tensor, end: int, cuts: set[int]) -> torch.Tensor:
    """The answer to request ``r``, whose tokens come in steps that end at the cuts."""
    edges = sorted({0, end, *(cut for cut in cuts if cut < end)})
    found = [
        scores.step(hidden[low:high], [Chunk("r", low, high, 0)])
        for low, high in itertools.pairwise(edges)
    ]
    assert [list(step) for step in found] == [[]] * (len(found) - 1) + [["r"]]
    return found[-1]["r"]


SAMPLED = parts(longest=3).filter(lambda after: any(n for of, n in after if of == "student"))


@settings(deadline=None)
@given(
    after=SAMPLED,
    kind=st.sampled_from(["best", "given", "states"]),
    cuts=st.sets(st.integers(1, 20)),
)
def test_rows_of_spans_are_those_of_tokens_alone(after: Parts, kind: str, cuts: set[int]) -> None:
    rollout = sequence("p/0", after, vocabulary=VOCABULARY, top_k=2)
    hidden, asked, scores = states(rollout.tokens), asked_of(rollout, kind), scorer()
    scores.add("r", asked)
    together = in_steps(scores, hidden, asked.end, cuts)
    ids = np.frombuffer(asked.ids, np.int32).reshape(asked.rows, asked.columns)
    assert len(together) == len(sampled_positions(rollout))
    for row, at in enumerate(sampled_positions(rollout)):
        scores.add("r", replace(asked, ranges=((at - 1, at),), ids=ids[row].tobytes()))
        alone = scores.step(hidden[:at], [Chunk("r", 0, at, 0)])["r"]
        same(together[row : row + 1], alone, asked)


def same(found: torch.Tensor, expected: torch.Tensor, asked: RowRequest) -> None:
    """The same ids, and the same numbers but for the rounding of products of other shapes."""
    if asked.states:
        assert torch.equal(found, expected)
        return
    numbers = [logprobs_of(one.numpy(), asked.top_k) for one in (found, expected)]
    np.testing.assert_allclose(*numbers, atol=1e-5)
    ids = asked.width - asked.top_k
    assert torch.equal(found[:, ids:], expected[:, ids:])


def test_a_row_of_the_first_of_two_spans_that_the_cache_held_makes_the_answer_empty() -> None:
    scores, asked = scorer(), replace(wanted(0, ids_of(4)), ranges=((2, 4), (6, 8)))
    scores.add("r", asked)
    assert scores.step(states(4), [Chunk("r", 3, 7, 0)]) == {}
    assert len(scores.step(states(1), [Chunk("r", 7, 8, 0)])["r"]) == 0


def test_a_request_of_two_spans_that_was_preempted_between_them_starts_again() -> None:
    scores, hidden, ids = scorer(), states(8), ids_of(4)
    scores.add("r", replace(wanted(0, ids), ranges=((2, 4), (6, 8))))
    scores.step(hidden[:5], [Chunk("r", 0, 5, 0)])
    found = scores.step(hidden[3:], [Chunk("r", 3, 8, 0)])["r"]
    expected = table(hidden[[2, 3, 6, 7]]).gather(1, torch.from_numpy(ids))
    np.testing.assert_allclose(numbers(found, 2), expected, atol=1e-5)


@pytest.mark.parametrize("temperature", [0.3, 1.0, 2.5])
def test_log_probabilities_are_those_of_the_tempered_teacher(temperature: float) -> None:
    """log p^(1/T) / Z, in float64, of all tokens: given ones and the best."""
    every = np.tile(np.arange(VOCABULARY), (3, 1))
    found = numbers(answer(tempered(every, temperature)), VOCABULARY, K)
    p = table(states(3)).exp() ** (1 / temperature)
    expected = (p / p.sum(-1, keepdim=True)).log()
    np.testing.assert_allclose(found[:, :VOCABULARY], expected, atol=1e-5)
    np.testing.assert_allclose(found[:, VOCABULARY:], expected.topk(K).values, atol=1e-5)


def test_temperature_1_changes_no_bit_and_no_other_the_order_of_the_best_or_states() -> None:
    plain = wanted(0, ids_of(3), K)
    assert torch.equal(answer(plain), answer(replace(plain, temperature=1.0)))
    ids = [answer(tempered(ids_of(3), t))[:, -K:].tolist() for t in (0.5, 1.0, 4.0)]
    assert ids[0] == ids[1] == ids[2]
    assert torch.equal(answer(RowRequest(((0, 3),), temperature=2.0)), states(3))


def test_a_hot_teacher_knows_nothing_and_a_cold_one_only_its_best_token() -> None:
    every = np.tile(np.arange(VOCABULARY), (3, 1))
    hot = numbers(answer(tempered(every, 1e6)), VOCABULARY, K)
    np.testing.assert_allclose(hot, -np.log(VOCABULARY), atol=1e-4)
    rest = rest_of(answer(tempered(every, 1e6)), K)
    np.testing.assert_allclose(rest, np.log((VOCABULARY - K) / VOCABULARY), atol=1e-4)
    cold = numbers(answer(tempered(every, 1e-4)), VOCABULARY, K)[:, VOCABULARY:]
    assert cold[:, 0].tolist() == [0, 0, 0]
    assert (cold[:, 1:] < -100).all()


def test_requests_of_two_temperatures_may_share_a_step() -> None:
    scores, hidden, ids = scorer(), states(4), ids_of(2)
    scores.add("a", tempered(ids, 2.0))
    scores.add("b", wanted(0, ids, K))
    found = scores.step(hidden, [Chunk("a", 0, 2, 0), Chunk("b", 0, 2, 2)])
    for name, start, t in (("a", 0, 2.0), ("b", 2, 1.0)):
        expected = (table(hidden[start : start + 2]) / t).log_softmax(-1)
        own = expected.gather(1, torch.from_numpy(ids))
        np.testing.assert_allclose(numbers(found[name], 2, K)[:, :2], own, atol=1e-5)


def test_requests_of_one_step_are_distinguished() -> None:
    scores, hidden = scorer(), states(7)
    first, second = ids_of(2), ids_of(3)
    scores.add("a", wanted(0, first))
    scores.add("b", wanted(1, second))
    found = scores.step(hidden, [Chunk("b", 0, 4, 0), Chunk("x", 0, 1, 4), Chunk("a", 0, 2, 5)])
    for name, start, ids in (("a", 5, first), ("b", 1, second)):
        expected = table(hidden[start : start + len(ids)]).gather(1, torch.from_numpy(ids))
        np.testing.assert_allclose(numbers(found[name], 2), expected, atol=1e-5)


def test_requests_of_different_kinds_may_share_a_step() -> None:
    scores, hidden = scorer(), states(4)
    scores.add("a", wanted(0, ids_of(2), K))
    scores.add("b", RowRequest(((0, 2),)))
    found = scores.step(hidden, [Chunk("a", 0, 2, 0), Chunk("b", 0, 2, 2)])
    assert found["a"].shape == (2, 2 + 2 * K + 1)
    torch.testing.assert_close(found["b"], hidden[2:])


def test_states_of_bfloat16_are_its_bits() -> None:
    scores, hidden = scorer(), states(2).bfloat16()
    scores.add("r", RowRequest(((0, 2),)))
    found = scores.step(hidden, [Chunk("r", 0, 2, 0)])["r"]
    torch.testing.assert_close(found.view(torch.bfloat16), hidden)


def test_a_token_without_a_row_is_impossible_and_aborted_requests_are_forgotten() -> None:
    scores = scorer()
    scores.add("r", wanted(0, np.array([[VOCABULARY, 0]])))
    found = numbers(scores.step(states(1), [Chunk("r", 0, 1, 0)])["r"], 2)
    assert np.isinf(found).tolist() == [[True, False]]
    scores.add("r", wanted(0, ids_of(1)))
    scores.keep_only({"s"})
    assert scores.step(states(1), [Chunk("r", 0, 1, 0)]) == {}


@pytest.mark.parametrize("support", ["its own", "given"])
@pytest.mark.parametrize("mass", [0.1, 1e-4, 1e-8, 1e-15, 1e-30])
def test_the_rest_of_a_support_is_exact_however_little_it_is(mass: float, support: str) -> None:
    """The head is the identity: states are logits."""
    logits = torch.randn(2, VOCABULARY, generator=torch.Generator().manual_seed(2)).double() / 4
    logits[:, K:] += np.log(mass) - logits[:, K:].logsumexp(1, keepdim=True)
    logits[:, :K] += np.log1p(-mass) - logits[:, :K].logsumexp(1, keepdim=True)
    scores = RowScores(lambda states: states.clone(), VOCABULARY)
    own = support == "its own"
    ids = torch.arange(K).expand(2, K)
    if own:
        logits[:, :K] = logits[:, :K].sort(descending=True).values
    found = scores.score(
        logits.float(), ids[:, :1] if own else torch.cat([ids[:, :1], ids], 1), K * own
    )
    np.testing.assert_allclose(rest_of(found, K * own), np.log(mass), rtol=1e-6, atol=2e-6)


def test_the_sampled_token_alone_has_no_rest_and_is_no_part_of_a_given_support() -> None:
    assert answer(wanted(0, ids_of(2, 1))).shape == (2, 1)
    found = answer(wanted(0, np.array([[5, 1, 2]])))
    expected = table(states(1)).scatter(1, torch.tensor([[1, 2]]), -torch.inf).logsumexp(1)
    np.testing.assert_allclose(rest_of(found), expected, atol=1e-5)


def test_a_token_without_a_row_takes_no_other_out_of_the_rest() -> None:
    found = answer(wanted(0, np.array([[0, VOCABULARY + 3, VOCABULARY - 1, VOCABULARY]])))
    expected = table(states(1))[:, : VOCABULARY - 1].logsumexp(1)
    np.testing.assert_allclose(rest_of(found), expected, atol=1e-5)


def test_a_support_of_all_tokens_leaves_nothing() -> None:
    assert rest_of(answer(wanted(0, ids_of(2), VOCABULARY)), VOCABULARY).tolist() == [-np.inf] * 2


def test_a_prompt_of_which_the_cache_held_all_but_its_last_row_is_answered() -> None:
    scores, hidden, ids = scorer(), states(5), ids_of(2)
    scores.add("r", wanted(3, ids))
    found = scores.step(hidden[3:], [Chunk("r", 3, 5, 0)])["r"]
    expected = table(hidden[3:]).gather(1, torch.from_numpy(ids))
    np.testing.assert_allclose(numbers(found, 2), expected, atol=1e-5)


def test_a_request_survives_the_way_to_the_worker_and_others_have_none() -> None:
    assert RowRequest.of(None) is None
    assert RowRequest.of({"kv": 1}) is None
    asked = tempered(ids_of(2), 0.7)
    assert RowRequest.of(asked.arguments()) == asked
