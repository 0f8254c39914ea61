"""Supervised samples: a prompt, and an answer whose tokens are trained on as they are.

row ──prompt, answer──► token ids ──► Sample, whose teacher gives every token of the answer mass 1
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np

from async_opd.core.errors import RolloutFault
from async_opd.core.samples import FinishReason, Prompt, Rollout, Sample
from async_opd.core.scores import SampledLogprobs
from async_opd.core.uid import Uid


@dataclass(frozen=True)
class GivenAnswers:
    """The answers of the rows themselves.

    ``encode`` gives the tokens of a text without added special ones. ``end`` is the token that
    ends a response; ``limit`` the longest response in tokens, with its end.
    """

    encode: Callable[[str], list[int]]
    end: int
    limit: int

    def rollout(self, prompt: Prompt) -> Rollout:
        """The answer of the prompt's row as a response.

        RolloutFault for a row without one, or with one that cannot be tokenized.
        """
        row = prompt.row
        if row is None or row.answer is None:
            cause = f"row {prompt.uid} has no answer to train on"
            raise RolloutFault("prompt", cause, "name its field in data.answer")
        try:
            ids = [*self.encode(row.answer), self.end]
        except Exception as error:  # a tokenizer can raise anything
            cause = f"the answer of row {prompt.uid} cannot be tokenized: {error}"
            raise RolloutFault("prompt", cause, "correct the answer") from error
        finish: FinishReason = "stop" if len(ids) <= self.limit else "length"
        return Rollout.answer(Uid(f"{prompt.uid}/0"), prompt, ids[: self.limit], finish)


def supervised(rollout: Rollout) -> Sample:
    """The sample that is trained with the cross entropy of the rollout's response."""
    certain = np.zeros(len(rollout.response_ids), np.float32)
    plain = rollout.without_teacher_inputs
    prompt = replace(plain.prompt, row=None)
    changed = replace(plain, prompt=prompt, rollout_logprobs=certain)
    return Sample(changed, SampledLogprobs(certain))
