"""The learner: one batch of samples, one optimizer step.

    samples ──shares──► weight of each token ─┐
       └──plan, pack──► micro-batches ────────┴──► StudentLoss ──► AdamW ◄── clip ◄── gradients

Shares are those of the whole batch (``shares.py``), so that the gradient does not depend on how it
is split. Logits exist for one chunk of response rows at a time (``losses/chunked.py``).
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from async_opd.core.errors import StageError
from async_opd.core.samples import Sample
from trainer.heads import load_heads
from trainer.losses import Head, Objective, build_objective
from trainer.losses.report import Metrics, joined, step_metrics
from trainer.named_weights import named_weights
from trainer.packing import (
    Packed,
    Vocabularies,
    pack,
    plan,
    refuse_foreign_tokens,
    refuse_mixed_scores,
)
from trainer.repetition import repetition
from trainer.schedule import learning_rate
from trainer.shares import Shares
from trainer.student import check_student, load_student
from trainer.student_loss import StudentLoss

if TYPE_CHECKING:
    from async_opd.core.config import RunConfig, TrainConfig

CPU_ROW_TOKENS = 512
"""Longest packed row on a CPU: its attention is dense, quadratic in the row with everything that
the mask hides, and holds nothing that a wider row would keep busy."""


@dataclass(frozen=True)
class LearnerReport:
    """Metrics of one step."""

    metrics: dict[str, float]


class Learner:
    """Owns the student's float32 master weights and their optimizer."""

    def __init__(
        self,
        model: Any,
        objective: Objective,
        train: TrainConfig,
        device: torch.device,
        shares: Shares | None = None,
        heads: Mapping[str, Head] | None = None,
    ) -> None:
        """``shares`` say what each token weighs, by default 1 / (tokens of the batch).

        ``heads`` are the teachers', for objectives over the whole vocabulary.
        """
        self.model = model.to(device)
        self._shares = shares or Shares()
        self._train = train
        self._device = device
        self._autocast = train.dtype == "bfloat16" or (
            train.dtype == "auto" and device.type == "cuda"
        )
        self._student_loss = StudentLoss(
            self.model, objective, heads or {}, torch.bfloat16 if self._autocast else None
        )
        rows = self._student_loss.vocabulary
        self._vocabularies = Vocabularies(
            rows, {name: min(rows, head.vocabulary) for name, head in (heads or {}).items()}
        )
        self._row_tokens = train.tokens_per_micro_batch
        if device.type == "cpu":
            self._row_tokens = min(self._row_tokens, CPU_ROW_TOKENS)
        self._step = 0
        decayed = [p for p in model.parameters() if p.requires_grad and p.ndim >= 2]
        others = [p for p in model.parameters() if p.requires_grad and p.ndim < 2]
        self._optimizer = torch.optim.AdamW(
            [
                {"params": decayed, "weight_decay": train.weight_decay},
                {"params": others, "weight_decay": 0.0},
            ],
            lr=train.lr,
            betas=train.betas,
            fused=True,
        )

    def train_batch(self, samples: Sequence[Sample]) -> LearnerReport:
        """One optimizer step, or an error that leaves weights, optimizer and step as they were.

        StageError if loss or gradient is not finite, a metric of the loss is not a number, or a
        token is not in the student's vocabulary. TypeError for scores of several kinds, however
        they would be split. A batch without any response token has loss 0 and changes no weight,
        but is a step.
        """
        refuse_mixed_scores(samples)
        refuse_foreign_tokens(samples, self._vocabularies)
        try:
            return self._train_batch(samples)
        finally:
            self._optimizer.zero_grad(set_to_none=True)

    def _train_batch(self, samples: Sequence[Sample]) -> LearnerReport:
        started = time.perf_counter()
        self.model.train()
        shares, rewards = self._shares(samples)
        groups = plan([s.rollout.tokens for s in samples], self._row_tokens)
        reports = []
        for group in groups:
            group.sort(key=lambda index: samples[index].rollout.prompt.teacher)
            packed = pack([samples[i] for i in group], [shares[i] for i in group])
            reports.append(self._backward(packed.to(self._device)))
        means = step_metrics(joined(reports)) | rewards
        norm = float(
            torch.nn.utils.clip_grad_norm_(self.model.parameters(), self._train.max_grad_norm)
        )
        self._refuse_if_not_finite(means, norm, samples)
        rate = learning_rate(self._step, self._train)
        for parameters in self._optimizer.param_groups:
            parameters["lr"] = rate
        self._optimizer.step()
        self._step += 1
        metrics = {
            **means,
            "train/grad_norm": norm,
            "train/lr": rate,
            "train/micro_batches": float(len(groups)),
            "train/compute_s": time.perf_counter() - started,
        }
        return LearnerReport(metrics | self._shape(samples))

    def _shape(self, samples: Sequence[Sample]) -> dict[str, float]:
        """What the batch consists of: tokens, and samples cut off, empty or over the budget."""
        rollouts = [sample.rollout for sample in samples]
        count = max(len(rollouts), 1)
        lengths = [len(rollout.response_ids) for rollout in rollouts]
        over = sum(r.tokens > self._train.tokens_per_micro_batch for r in rollouts)
        return {
            "train/tokens": float(sum(rollout.tokens for rollout in rollouts)),
            "train/response_tokens": float(sum(lengths)),
            "train/mean_response_tokens": sum(lengths) / count,
            "train/std_response_tokens": float(np.std(lengths)) if lengths else 0.0,
            "train/truncated_share": sum(r.finish_reason == "length" for r in rollouts) / count,
            "train/empty_responses": float(lengths.count(0)),
            "train/over_budget": float(over),
            "train/repetition": sum(map(repetition, rollouts)) / count,
        }

    def named_weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Current weights under their checkpoint names, in the engines' dtype.

        bfloat16 from a GPU, float32 from a CPU. A head tied to the embedding is left out, as in
        the checkpoint.
        """
        dtype = torch.bfloat16 if self._device.type == "cuda" else torch.float32
        return named_weights(self.model, dtype)

    def check(self) -> None:
        """StageError for an architecture whose logits this learner would compute wrongly."""
        check_student(self.model, self._device, self._precision())

    def _backward(self, packed: Packed) -> Metrics:
        """Adds the micro-batch's gradients; returns the values of its response tokens."""
        if len(packed.rows) == 0:
            return {}
        metrics: Metrics
        with self._precision():
            loss, metrics = self._student_loss(packed)
        torch.autograd.backward(loss)
        return metrics

    def _precision(self) -> AbstractContextManager[Any]:
        if self._autocast:
            return torch.autocast(self._device.type, dtype=torch.bfloat16)
        return nullcontext()

    def _refuse_if_not_finite(
        self, means: dict[str, float], norm: float, samples: Sequence[Sample]
    ) -> None:
        loss = means["loss/total"]
        broken = [key for key, value in means.items() if math.isnan(value)]
        if math.isfinite(loss) and math.isfinite(norm) and not broken:
            return
        seen = f"loss {loss}, gradient norm {norm}"
        if broken:
            seen += f", not a number: {', '.join(broken)}"
        uids = ", ".join(sample.rollout.uid for sample in samples)
        raise StageError(
            "trainer",
            f"step {self._step}: {seen}; batch of {len(samples)}: {uids}",
            "lower train.lr, or look for teacher scores of these samples that are not finite",
        )


def build_learner(config: RunConfig, device_name: str) -> Learner:
    """Seeds torch, loads the student in float32 and checks that its logits come out right."""
    torch.manual_seed(config.seed)
    device = torch.device(device_name)
    model = load_student(config, device)
    objective = build_objective(config.loss, config.reward, config.rollout.temperature)
    shares = Shares.of(config.loss, config.reward, config.rollout.max_tokens)
    heads = load_heads(config, len(model.get_output_embeddings().weight), device)
    learner = Learner(model, objective, config.train, device, shares, heads)
    learner.check()
    return learner
