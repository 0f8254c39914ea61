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
from trainer.checkpoint import Tensors, copy_state, load_state
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
    """Metrics of one step, and why nothing was learned in it, if that is so."""

    metrics: dict[str, float]
    skipped: str = ""


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
        self._skipped = self._skipped_in_a_row = 0
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

    def free_cache(self) -> None:
        """Gives memory of past steps back to the GPU, for others on it."""
        if self._device.type == "cuda":
            torch.cuda.empty_cache()

    def train_batch(self, samples: Sequence[Sample]) -> LearnerReport:
        """One optimizer step, or an error that leaves weights, optimizer and step as they were.

        If loss or gradient is not finite or a metric of the loss is not a number: StageError, or a
        report that says so (``train.on_nonfinite``), and the step is made without learning.
        StageError for a token that is not in the student's vocabulary. TypeError for scores of
        several kinds, however they would be split. A batch without any response token has loss 0
        and changes no weight, but is a step.
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
        trained = [samples[i].rollout for group in groups for i in group]
        runs = [(rollout.prompt.teacher, len(rollout.response_ids)) for rollout in trained]
        means = step_metrics(joined(reports), runs) | rewards
        norm = float(
            torch.nn.utils.clip_grad_norm_(self.model.parameters(), self._train.max_grad_norm)
        )
        rate = learning_rate(self._step, self._train)
        fault = _not_finite(means, norm)
        if fault:
            self._skip(fault, samples)
        else:
            self._skipped_in_a_row = 0
            for parameters in self._optimizer.param_groups:
                parameters["lr"] = rate
            self._optimizer.step()
        self._step += 1
        metrics = {
            **means,
            "train/grad_norm": norm,
            "train/lr": rate,
            "train/skipped_steps": float(self._skipped),
            "train/micro_batches": float(len(groups)),
            "train/compute_s": time.perf_counter() - started,
        }
        return LearnerReport(metrics | self._shape(samples), fault)

    def _skip(self, fault: str, samples: Sequence[Sample]) -> None:
        """Counts a step that is left out. StageError if it may not be."""
        train = self._train
        self._skipped_in_a_row += 1
        if train.on_nonfinite == "skip" and self._skipped_in_a_row <= train.max_skipped:
            self._skipped += 1
            return
        before = f", after {train.max_skipped} steps left out" if self._skipped_in_a_row > 1 else ""
        uids = ", ".join(sample.rollout.uid for sample in samples)
        raise StageError(
            "trainer",
            f"step {self._step}{before}: {fault}; batch of {len(samples)}: {uids}",
            "lower train.lr, or look at what is in these samples; train.on_nonfinite: skip leaves "
            "out single steps",
        )

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

    def state(self) -> Tensors:
        """A copy of weights, optimizer and random states in host memory."""
        return copy_state(self.model, self._optimizer)

    def restore(self, step: int, tensors: Tensors) -> None:
        """Goes on after ``step`` optimizer steps with the state of then."""
        load_state(self.model, self._optimizer, tensors)
        self._step = step

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


def _not_finite(means: Mapping[str, float], norm: float) -> str:
    """What of a step is not finite; empty if all that must be is."""
    loss = means["loss/total"]
    broken = [key for key, value in means.items() if math.isnan(value)]
    if math.isfinite(loss) and math.isfinite(norm) and not broken:
        return ""
    seen = f"loss {loss}, gradient norm {norm}"
    return seen + (f", not a number: {', '.join(broken)}" if broken else "")


def build_learner(config: RunConfig, device_name: str) -> Learner:
    """Seeds torch, loads the student in float32 and checks that its logits come out right."""
    torch.manual_seed(config.seed)
    device = torch.device(device_name)
    model = load_student(config, device)
    objective = build_objective(config.loss, config.reward, config.rollout.temperature)
    weights = {name: teacher.weight for name, teacher in config.teachers.items()}
    shares = Shares.of(config.loss, config.reward, config.rollout.max_tokens, weights)
    heads = load_heads(config, len(model.get_output_embeddings().weight), device)
    learner = Learner(model, objective, config.train, device, shares, heads)
    learner.check()
    return learner
