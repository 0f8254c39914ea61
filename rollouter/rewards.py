"""Task rewards, where it is sampled: a finished rollout gets its grader's number.

Rollout(prompt with its row) ──decode, grade: in a process of its own──► Rollout(reward; no row)
"""

from __future__ import annotations

from dataclasses import replace

from async_opd.core.errors import StageError
from async_opd.core.samples import Rollout
from async_opd.grading.grader_pool import Graders, GraderSpec
from async_opd.grading.graders import GradeError
from async_opd.models.tokenizer import Text


class RewardGrader:
    """One grader and the student's tokenizer."""

    def __init__(self, grader: GraderSpec, model_dir: str) -> None:
        self._graders = Graders(grader)
        self._text = Text(model_dir)

    async def grade(self, rollout: Rollout) -> Rollout:
        """The rollout with its reward; the row has done its work and travels no further.

        GradeError naming the rollout if the grader raises, returns no number from 0 to 1, or takes
        too long.
        """
        row = rollout.prompt.row
        if row is None:
            raise StageError("grader", f"rollout {rollout.uid} came without its prompt's row")
        try:
            reward = await self._graders.grade(
                self._text.decode(rollout.response_ids.tolist()), row
            )
        except GradeError as error:
            cause = f"rollout {rollout.uid}: {error.cause}"
            raise GradeError(error.stage, cause, error.remedy) from error
        return replace(rollout, prompt=replace(rollout.prompt, row=None), reward=reward)

    def close(self) -> None:
        """Ends the grader's processes."""
        self._graders.close()
