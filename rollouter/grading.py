"""Task rewards, in the process that samples: a finished rollout gets its grader's number.

Rollout(prompt with its row) ──decode, grade: in a thread──► Rollout(reward; prompt without it)
"""

from __future__ import annotations

import asyncio
from dataclasses import replace

from async_opd.core.errors import StageError
from async_opd.core.graders import GradeError, load_grader
from async_opd.core.samples import Rollout
from async_opd.core.text import Text


class Grading:
    """One grader and the student's tokenizer, loaded once in this process."""

    def __init__(self, grader: str, model_dir: str) -> None:
        """ImportError, AttributeError or ValueError if there is no such grader."""
        self._grader = load_grader(grader)
        self._text = Text(model_dir)

    async def grade(self, rollout: Rollout) -> Rollout:
        """The rollout with its reward; the row has done its work and travels no further.

        GradeError naming the rollout if the grader raises or returns no number from 0 to 1.
        """
        reward = await asyncio.to_thread(self._reward, rollout)
        return replace(rollout, prompt=replace(rollout.prompt, row=None), reward=reward)

    def _reward(self, rollout: Rollout) -> float:
        row = rollout.prompt.row
        if row is None:
            raise StageError("grader", f"rollout {rollout.uid} came without its prompt's row")
        try:
            return self._grader(self._text.decode(rollout.response_ids.tolist()), row)
        except GradeError as error:
            cause = f"rollout {rollout.uid}: {error.cause}"
            raise GradeError(error.stage, cause, error.remedy) from error
