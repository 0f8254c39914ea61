"""The evaluation that a config asks for."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from async_opd.config.run_config import RunConfig
from async_opd.core.row import Row
from async_opd.core.samples import Prompt, Rollout
from async_opd.core.stages import SamplingSpec
from async_opd.grading.evaluation_set import evaluation_of
from tests.conftest import make_rollout
from tests.tools.plan.runs import CONFIG


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
