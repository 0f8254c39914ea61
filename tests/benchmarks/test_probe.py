"""The benchmark of ``async_opd probe``: its models, its runs, its figures."""

from __future__ import annotations

import asyncio
from dataclasses import asdict

import numpy as np
import pytest
import torch

from async_opd.core.batch import Batch, unpack
from async_opd.core.samples import Prompt, Sample
from async_opd.core.scores import TopK
from async_opd.core.uid import Uid
from benchmarks.probe import PAIRS, WRONG, Pair, Result, spearman, summary
from benchmarks.probe_models import TorchModel, answers_of, digits, prompts_of, untrained
from benchmarks.probe_run import GREEDY, SAMPLED, distil


def result(teacher: str, score: float, gain: float, kind: str = "will_teach") -> Result:
    return Result(Pair("sort", "weak", teacher), {}, kind, score, 0.2, 0.2 + gain, 1.0, 0.1, 9.0)


def test_the_rank_correlation_depends_on_the_order_alone() -> None:
    assert spearman([1, 2, 3], [0.1, 5, 90]) == pytest.approx(1)
    assert spearman([1, 2, 3], [9, 5, 1]) == pytest.approx(-1)
    assert spearman([1], [2]) is None
    assert spearman([1, 1, 2, 3], [1, 2, 3, 4]) == pytest.approx(0.9486833)  # as scipy's


def test_the_summary_counts_missed_and_false_templates() -> None:
    good, wrong = result("expert", 0.5, 0.5), result("marked", -0.1, -0.1, "wrong_template")
    assert summary([good, wrong])["templates_found"] == 1
    false = result("fair", 0.1, 0.1, "wrong_template")
    assert summary([good, wrong, false])["templates_found"] == 0.5
    assert "templates_found" not in summary([good])
    assert summary([good, wrong])["cost_share"] == pytest.approx(1 / 100)
    assert asdict(good)["pair"]["teacher"] == "expert"


def test_there_are_enough_pairs_of_every_sort() -> None:
    assert len(PAIRS) >= 24
    assert {pair.teacher for pair in PAIRS} > WRONG


async def test_a_torch_model_scores_what_it_samples() -> None:
    model = TorchModel(untrained(0))
    ids = prompts_of("sort", digits(3, 1)).astype(np.int32)
    prompts = [Prompt(Uid(f"p{at}"), "sort", "t", one) for at, one in enumerate(ids)]
    made = await model.generate(prompts, SAMPLED)
    for sample in unpack(Sample, [await model.score(Batch.pack(made))]):
        assert isinstance(sample.scores, TopK)
        sampled = sample.rollout.rollout_logprobs
        assert sample.scores.sampled_logprobs == pytest.approx(sampled, abs=1e-5)
        assert sample.scores.rest_logprobs is not None
        mass = np.exp(sample.scores.logprobs).sum(1) + np.exp(sample.scores.rest_logprobs)
        assert mass == pytest.approx(1, abs=1e-5)
    greedy = await model.generate(prompts, GREEDY)
    again = await model.generate(prompts, GREEDY)
    assert [one.response_ids.tolist() for one in greedy] == [
        one.response_ids.tolist() for one in again
    ]


def test_answers_end_and_follow_the_task() -> None:
    shown = np.array([[3, 1, 2, 0]])
    assert answers_of("sort", shown).tolist() == [[0, 1, 2, 3, 10]]
    assert answers_of("reverse", shown).tolist() == [[0, 2, 1, 3, 10]]


@pytest.mark.slow
def test_a_run_in_one_process_moves_the_student() -> None:
    student, teacher = untrained(0), untrained(1)
    before = {name: value.clone() for name, value in student.state_dict().items()}
    trained = asyncio.run(distil(student, teacher, prompts_of("sort", digits(64, 1)), 2, 0))
    weights = trained.state_dict()
    assert all(torch.equal(before[name], value) for name, value in student.state_dict().items())
    assert not any(torch.equal(before[name], weights[name]) for name in before)
