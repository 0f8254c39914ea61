"""Task rewards: the replica that sampled a rollout has it graded.

Rollout(prompt with its row) ──decode, grade in the grader's process──► Rollout(reward; no row)
"""

from __future__ import annotations

from dataclasses import replace

from async_opd.core.errors import StageError
from async_opd.core.samples import Rollout
from async_opd.grading.grader_pool import Graders, GraderSpec
from async_opd.grading.graders import GradeError
from async_opd.models.tokenizer import Text


class RewardGrader:
    """A grader, and the student's tokenizer to decode responses for it."""

    def __init__(self, grader: GraderSpec, model_dir: str) -> None:
        self._graders = Graders(grader)
        self._text = Text(model_dir)

    async def grade(self, rollout: Rollout) -> Rollout:
        """The rollout with its reward and without its row, which no later stage needs.

        GradeError with the rollout's uid if the grader raises, returns no number from 0 to 1, or
        takes too long. StageError for a rollout without a row.
        """
        row = rollout.prompt.row
        if row is None:
            raise StageError("grader", f"rollout {rollout.uid} came without its prompt's row")
        try:
            text = self._text.decode(rollout.response_ids.tolist())
            reward = float(await self._graders.grade(text, row))
        except GradeError as error:
            cause = f"rollout {rollout.uid}: {error.cause}"
            raise GradeError(error.stage, cause, error.remedy) from error
        return replace(rollout, prompt=replace(rollout.prompt, row=None), reward=reward)

    def close(self) -> None:
        """Ends the grader's processes."""
        self._graders.close()
