"""Which rows of a micro-batch are recorded, and the most probable tokens of both sides there.

    logits [n, V] ──before the objective overwrites them──► most_probable ──┐
    objective ──log q, log p of the sampled tokens─────────► normalized ◄───┘

Log-probabilities come from the logits of the loss and its own normalization: the logit of a token
minus that of the sampled token, plus the log-probability that the loss has for the sampled one.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from trainer.losses.base import Recorded, Tokens

STUDENT, TEACHER = "student_logprob", "teacher_logprob"
"""Values of tokens that objectives give for records only: log q and log p of the sampled ones."""
STUDENT_IDS, STUDENT_TOP = "student_ids", "student_logprobs"
SUPPORT_IDS, OF_TEACHER = "support_ids", "support_teacher_logprobs"
OF_STUDENT = "support_student_logprobs"
TOP = (STUDENT_IDS, STUDENT_TOP, SUPPORT_IDS, OF_TEACHER, OF_STUDENT)
"""Values of recorded tokens only, [recorded, k], in the order of rows."""


def most_probable(
    logits: torch.Tensor, tokens: Tokens, teacher: torch.Tensor | None, recorded: Recorded
) -> dict[str, torch.Tensor]:
    """Tokens [recorded, k] of the support and of the student, and logits less the sampled token's.

    ``logits`` [n, V] are the student's at temperature 1, ``teacher`` [n, V_teacher] a teacher's
    where the objective has them. The support's columns are absent where there is none.
    """
    parts = []
    for one in recorded.rows:
        rows = slice(one.start, one.stop)
        own, sampled = logits[rows], tokens.targets[rows, None]
        ours = own.gather(-1, sampled)
        top = own.topk(min(recorded.k, own.shape[-1]))
        part = {STUDENT_IDS: top.indices, STUDENT_TOP: top.values - ours}
        ids, theirs = None, None
        if teacher is not None:
            common = teacher[rows, : min(own.shape[-1], teacher.shape[-1])]
            best = common.topk(min(recorded.k, common.shape[-1]))
            ids, theirs = best.indices, best.values - common.gather(-1, sampled)
        elif tokens.teacher_ids is not None and tokens.teacher_topk_logprobs is not None:
            ids = tokens.teacher_ids[rows, : recorded.k]
            theirs = tokens.teacher_topk_logprobs[rows, : recorded.k]
        if ids is not None and theirs is not None:
            part |= {SUPPORT_IDS: ids, OF_TEACHER: theirs, OF_STUDENT: own.gather(-1, ids) - ours}
        parts.append(part)
    return {name: torch.cat([part[name] for part in parts]) for name in parts[0]} if parts else {}


def normalized(
    top: Mapping[str, torch.Tensor],
    values: Mapping[str, torch.Tensor],
    teacher: torch.Tensor | None,
    recorded: Recorded,
) -> dict[str, torch.Tensor]:
    """Log-probabilities in place of the differences of logits; ``values`` [n] are the objective's.

    ``teacher`` as before: a support's log-probabilities are the teacher's own already.
    """
    found = dict(top)
    if found:
        ours = recorded.of(values[STUDENT])[:, None]
        for name in {STUDENT_TOP, OF_STUDENT} & found.keys():
            found[name] = found[name] + ours
        if teacher is not None:
            found[OF_TEACHER] = found[OF_TEACHER] + recorded.of(values[TEACHER])[:, None]
    return found
