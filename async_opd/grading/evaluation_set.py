"""The evaluation of a config: its prompts, how they are sampled and graded, where answers are kept.

rows of data.eval ──the first max_prompts of each source──► prompts ──► Evaluation
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import chain
from pathlib import Path

from async_opd.config.run_config import RunConfig
from async_opd.config.secrets import Redactor
from async_opd.config.sections.environment import ENVIRONMENT
from async_opd.core.row import Row
from async_opd.core.samples import Prompt, Rollout
from async_opd.core.stages import SamplingSpec
from async_opd.core.uid import Uid
from async_opd.data.prompts import to_prompt
from async_opd.data.teacher_prompts import Reader
from async_opd.grading.evaluation import Evaluation, GradeRollout
from async_opd.grading.evaluation_files import EvaluationFiles
from async_opd.grading.grader_pool import Graders, GraderSpec
from async_opd.grading.graders import Grade, GradeError, has_verifier
from async_opd.models.tokenizer import Text
from async_opd.pictures import ShownText, Thumbnails


def evaluation_of(
    config: RunConfig,
    sources: Iterable[Sequence[Row]],
    text: Text,
    folder: Path,
    readers: Mapping[str, Reader] | None = None,
    limit: int | None = None,
    thumbnails: Thumbnails | None = None,
) -> Evaluation | None:
    """The evaluation of the first ``eval.max_prompts`` rows per data source; None without rows.

    ``folder`` gets the answers. ``readers``: those of ``teacher_readers``. ``limit``: most tokens
    of a prompt, where ``data.overlong`` is ``truncate_left``. ``thumbnails`` gets the images of
    answers that are kept.
    """
    settings, taken = config.eval, Counter[str]()
    rows: dict[Uid, Row] = {}
    prompts: list[Prompt] = []
    for row in chain.from_iterable(sources):
        taken[row.data_source] += 1
        if settings.max_prompts is None or taken[row.data_source] <= settings.max_prompts:
            prompt = to_prompt(
                row,
                text.encode,
                config.teacher_of,
                graded=config.environment is not None,
                readers=readers,
                limit=limit if config.data.overlong == "truncate_left" else None,
                truncate=True,
                sized=text.image_tokens,
            )
            rows[prompt.uid] = replace(row, encoded={})  # a grader is sent no images
            prompts.append(prompt)
    if not prompts:
        return None
    graders = Graders(GraderSpec.of(config, settings.grader))
    redacted = Redactor(config.model_dump(mode="json", by_alias=True))
    most, in_all = (
        int(mib * (1 << 20)) for mib in (settings.samples_mib, settings.samples_total_mib)
    )
    encoded = {sha256: image for one in prompts for sha256, image in one.encoded.items()}
    decode = ShownText.of(text, config.student.model).decode
    files = EvaluationFiles(folder, most, in_all, decode, redacted, thumbnails, encoded)
    return Evaluation(
        tuple(prompts),
        sampling_of(config),
        rewarded if settings.grader == ENVIRONMENT else _by_graders(graders, text, rows),
        graders.close,
        settings.correct_at,
        files.write,
        frozenset(row.data_source for row in rows.values() if has_verifier(row)),
    )


def _by_graders(graders: Graders, text: Text, rows: Mapping[Uid, Row]) -> GradeRollout:
    turn = asyncio.Lock()

    async def grade(rollout: Rollout) -> Grade:
        async with turn:  # one response in each round of the loop, which has a run to drive
            await asyncio.sleep(0)
            response = "\n".join(text.decode(one.tolist()) for one in rollout.turns)
        return await graders.grade(response, rows[rollout.prompt.uid])

    return grade


async def rewarded(rollout: Rollout) -> Grade:
    """The environment's reward as a grade. GradeError without one, which counts as no grade."""
    if rollout.reward is None:
        cause = f"the environment gave rollout {rollout.uid} no reward"
        raise GradeError(ENVIRONMENT, cause, "add get_reward to it, or name a grader")
    return Grade(rollout.reward)


def sampling_of(config: RunConfig) -> SamplingSpec:
    """How evaluations sample."""
    settings = config.eval
    longest = settings.max_tokens or config.rollout.max_tokens
    return SamplingSpec(longest, settings.temperature, settings.top_p, settings.n)
