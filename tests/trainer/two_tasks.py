"""Two tasks with a tiny teacher each: one task's answers have most of the tokens of a batch.

A prompt is the task's mark and one of 26 symbols. A batch has eight responses to each prompt of the
long task and one to each of the short one. The long answer repeats one symbol, the short answer
is a single one: which, a table of the task says. A student starts knowing neither.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import numpy as np
import torch

from async_opd.config.sections.train import TrainConfig
from async_opd.core.samples import Prompt, Rollout, Sample, VersionSpan
from async_opd.core.scores import SampledLogprobs, Scores, TopK
from async_opd.core.uid import Uid
from tests.trainer.models import new_rank, tiny_model
from trainer.batches.token_weights import TokenWeighting
from trainer.learner import Learner

LENGTHS = {"long": 6, "short": 1}
RESPONSES = {"long": 8, "short": 1}
"""Of each prompt, in every batch."""
SYMBOLS = np.arange(4, 30)
MARKS = {"long": 1, "short": 2}
TABLES = {task: np.random.default_rng(mark).permutation(SYMBOLS) for task, mark in MARKS.items()}
TOP_K = 8


def prompts(task: str) -> np.ndarray[Any, Any]:
    """All prompts of a task, [26, 2]."""
    return np.stack([np.full(len(SYMBOLS), MARKS[task]), SYMBOLS], axis=1)


def answers(task: str) -> np.ndarray[Any, Any]:
    """The right answer to each of them, [26, tokens]."""
    return np.repeat(TABLES[task][:, None], LENGTHS[task], axis=1)


def learner(model: Any, lr: float, weighting: TokenWeighting | None = None) -> Learner:
    """Forward KL over a top-k support, at a constant rate."""
    train = TrainConfig(lr=lr, warmup_steps=0, schedule="constant", steps=1000)
    rank = new_rank(model, train)
    return Learner(rank, weighting)


@lru_cache
def teacher(task: str) -> Any:
    """A model that was trained on the task's answers."""
    made = learner(tiny_model(MARKS[task]), 5e-3)
    own = answers(task)
    given = SampledLogprobs(np.zeros(own.shape[1], np.float32))
    batch = [_sample(task, i, own[i], np.zeros(own.shape[1]), given) for i in range(len(own))]
    for _ in range(60):
        made.supervise(batch, 5e-3)
    return made.model


def solved(model: Any, task: str) -> float:
    """The share of the task's prompts whose most probable answer is right."""
    return float((_generated(model, task, prompts(task), None)[0] == answers(task)).all(1).mean())


def distilled(weighting: TokenWeighting, steps: int = 80, lr: float = 2e-3) -> dict[str, float]:
    """Distils both teachers into one student, on-policy; the share of each headroom captured.

    That is (student after - student before) / (teacher - student before), of ``solved``.
    """
    student = tiny_model(0)
    before = {task: solved(student, task) for task in LENGTHS}
    made = learner(student, lr, weighting)
    generator = torch.Generator().manual_seed(5)
    for _ in range(steps):
        made.train_batch([one for task in LENGTHS for one in _rollouts(student, task, generator)])
    return {
        task: (solved(student, task) - start) / (solved(teacher(task), task) - start)
        for task, start in before.items()
    }


def _rollouts(student: Any, task: str, generator: torch.Generator) -> list[Sample]:
    """``RESPONSES`` to each prompt, scored by the task's teacher."""
    asked = np.tile(prompts(task), (RESPONSES[task], 1))
    ids, logprobs = _generated(student, task, asked, generator)
    given = torch.from_numpy(np.concatenate([asked, ids], axis=1))
    scoring = teacher(task)
    with torch.no_grad():
        tables = scoring(input_ids=given).logits[:, 1:-1].log_softmax(-1)
    best = tables.topk(TOP_K, dim=-1)
    rest = tables.scatter(-1, best.indices, -torch.inf).logsumexp(-1).numpy()
    own = tables.gather(2, torch.from_numpy(ids)[..., None])[..., 0].numpy()
    found = (best.indices.int().numpy(), best.values.numpy(), own, rest)
    return [
        _sample(task, i, ids[i], logprobs[i], TopK(*(part[i] for part in found)))
        for i in range(len(ids))
    ]


def _generated(
    model: Any, task: str, asked: np.ndarray[Any, Any], generator: torch.Generator | None
) -> tuple[Any, Any]:
    """Token ids and log-probabilities of a response to each prompt; None: the most probable."""
    found, logprobs, past = [], [], None
    given = torch.from_numpy(asked)
    with torch.no_grad():
        for _ in range(LENGTHS[task]):
            out = model(input_ids=given, past_key_values=past, use_cache=True)
            past, table = out.past_key_values, out.logits[:, -1].log_softmax(-1)
            if generator is None:
                given = table.argmax(-1, keepdim=True)
            else:
                given = torch.multinomial(table.exp(), 1, generator=generator)
            found.append(given)
            logprobs.append(table.gather(1, given))
    return torch.cat(found, 1).numpy(), torch.cat(logprobs, 1).numpy()


def _sample(task: str, index: int, ids: Any, logprobs: Any, scores: Scores) -> Sample:
    rollout = Rollout.plain(
        uid=Uid(f"{task}{index}/0"),
        prompt=Prompt(
            Uid(f"{task}{index}"), task, task, prompts(task)[index % len(SYMBOLS)].astype(np.int32)
        ),
        response_ids=ids.astype(np.int32),
        rollout_logprobs=logprobs.astype(np.float32),
        version_spans=(VersionSpan(0, 0, len(ids)),),
        finish_reason="stop",
    )
    return Sample(rollout, scores)
