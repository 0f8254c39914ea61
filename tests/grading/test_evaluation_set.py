"""The evaluation that a config asks for."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from async_opd.config.run_config import RunConfig
from async_opd.core.row import Row
from async_opd.core.samples import Prompt, Rollout
from async_opd.core.stages import SamplingSpec
from async_opd.grading.evaluation_set import evaluation_of, sampling_of
from tests.conftest import make_rollout
from tests.tools.plan.runs import CONFIG
from tests.world.config import run_config


async def test_the_event_loop_goes_on_between_the_answers_that_are_graded(tmp_path: Path) -> None:
    rounds = 0
    decoded_in = list[int]()

    def decode(ids: list[int]) -> str:
        decoded_in.append(rounds)
        return "4"

    async def count() -> None:
        nonlocal rounds
        while True:
            rounds += 1
            await asyncio.sleep(0)

    async def answers(prompts: Sequence[Prompt], sampling: SamplingSpec) -> list[Rollout]:
        return [make_rollout(f"{prompt.uid}/0", "a") for prompt in prompts]

    text: Any = SimpleNamespace(decode=decode, encode=lambda prompt: [1], image_tokens=None)
    rows = [Row(uid, "a", uid, "4", {}) for uid in ("p", "q", "r")]
    evaluation = evaluation_of(RunConfig.model_validate(CONFIG), [rows], text, tmp_path)
    assert evaluation is not None
    async with asyncio.TaskGroup() as tasks:
        counting = tasks.create_task(count())
        await evaluation.run(answers, "eval")
        counting.cancel()
    assert len(set(decoded_in)) == 3


def test_answers_are_as_long_as_rollouts_unless_evaluations_have_their_own_bound() -> None:
    bounds = [{}, {"max_tokens": 5}]
    made = [run_config(rollout={"max_tokens": 9}, eval=own) for own in bounds]
    assert [sampling_of(config).max_tokens for config in made] == [9, 5]


@pytest.mark.parametrize(("overlong", "tokens"), [("filter", 6), ("truncate_left", 4)])
def test_long_prompts_are_cut_if_those_of_training_are(
    overlong: str, tokens: int, tmp_path: Path
) -> None:
    text: Any = SimpleNamespace(encode=lambda prompt: [1] * 6, image_tokens=None)
    config = run_config(data={"train": "rows.jsonl", "overlong": overlong})
    found = evaluation_of(config, [[Row("p", "t", "p", "4", {})]], text, tmp_path, limit=4)
    assert found is not None
    assert [len(prompt.token_ids) for prompt in found.prompts] == [tokens]
