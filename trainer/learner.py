"""The learner: one batch of samples, one optimizer step.

    samples ──plan, pack──► micro-batches ──► hidden states ──► response rows ──chunks──► loss
                                                                                            │
                    AdamW ◄── clip ◄── gradients of (sum over tokens) / (tokens of the batch)

The denominator is the number of response tokens of the whole batch, so that the gradient does not
depend on how the batch is split. Logits exist for one chunk of response rows at a time: they are
recomputed in the backward pass.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch.utils.checkpoint import checkpoint

from async_opd.core.config import RunConfig, TrainConfig
from async_opd.core.errors import StageError
from async_opd.core.samples import Sample
from trainer.losses import LossInputs, TokenLoss, build_loss
from trainer.named_weights import named_weights
from trainer.packing import Packed, pack, plan, refuse_mixed_scores
from trainer.schedule import learning_rate
from trainer.student import check_student, load_student

CHUNK_ROWS = 1024
"""Response rows whose logits are alive at the same time."""

CPU_ROW_TOKENS = 512
"""Longest packed row on a CPU: its attention is dense, quadratic in the row with everything that
the mask hides, and holds nothing that a wider row would keep busy."""


@dataclass(frozen=True)
class LearnerReport:
    """Metrics of one step; losses are means over response tokens."""

    metrics: dict[str, float]


class Learner:
    """Owns the student's float32 master weights and their optimizer."""

    def __init__(
        self, model: Any, loss: TokenLoss, train: TrainConfig, device: torch.device
    ) -> None:
        self.model = model.to(device)
        self._loss = loss
        self._train = train
        self._device = device
        self._autocast = train.dtype == "bfloat16" or (
            train.dtype == "auto" and device.type == "cuda"
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

        StageError if loss or gradient is not finite, or a metric of the loss is not a number.
        TypeError for a mix of top-k and sampled-token scores, however it would be split.
        A batch without any response token has loss 0 and changes no weight, but is a step.
        """
        refuse_mixed_scores(samples)
        try:
            return self._train_batch(samples)
        finally:
            self._optimizer.zero_grad(set_to_none=True)

    def _train_batch(self, samples: Sequence[Sample]) -> LearnerReport:
        started = time.perf_counter()
        self.model.train()
        response_tokens = sum(len(sample.rollout.response_ids) for sample in samples)
        groups = plan([s.rollout.tokens for s in samples], self._row_tokens)
        sums: dict[str, torch.Tensor] = {}
        for group in groups:
            packed = pack([samples[index] for index in group]).to(self._device)
            _add(sums, self._backward(packed, max(response_tokens, 1)))
        means = _means(sums, max(response_tokens, 1))
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

    def _backward(self, packed: Packed, denominator: int) -> dict[str, torch.Tensor]:
        """Adds the micro-batch's gradients; returns its sums over response tokens."""
        if len(packed.rows) == 0:
            return {}
        sums: dict[str, torch.Tensor] = {}
        losses = []
        with self._precision():
            states = self.model.base_model(
                input_ids=packed.input_ids, position_ids=packed.position_ids, use_cache=False
            ).last_hidden_state[0]
            rows = states[packed.rows]
            for start in range(0, len(packed.rows), CHUNK_ROWS):
                chunk = slice(start, start + CHUNK_ROWS)
                loss, metrics = checkpoint(
                    self._chunk,
                    rows[chunk],
                    packed,
                    chunk,
                    use_reentrant=False,
                    preserve_rng_state=False,
                )
                losses.append(loss)
                _add(sums, metrics)
        total = torch.stack(losses).sum()
        torch.autograd.backward(total / denominator)
        return sums | {"loss/total": total.detach()}

    def _chunk(
        self, rows: torch.Tensor, packed: Packed, chunk: slice
    ) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        """Loss and metrics of a chunk of response rows [n, hidden]; logits live only in here."""
        logits = self.model.get_output_embeddings()(rows)
        logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
        inputs = LossInputs(
            logprobs=logits.log_softmax(-1),
            targets=packed.targets[chunk],
            teacher_logprobs=packed.teacher_logprobs[chunk],
            teacher_ids=None if packed.teacher_ids is None else packed.teacher_ids[chunk],
            teacher_topk_logprobs=(
                None
                if packed.teacher_topk_logprobs is None
                else packed.teacher_topk_logprobs[chunk]
            ),
        )
        result = self._loss(inputs)
        log_q = inputs.sampled.detach()
        metrics = {f"loss/{key}": value.detach() for key, value in result.metrics.items()}
        metrics["loss/k1"] = (log_q - inputs.teacher_logprobs).sum()
        metrics["loss/rollout_gap"] = (log_q - packed.rollout_logprobs[chunk]).abs().sum()
        return result.loss, metrics

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


def _add(sums: dict[str, torch.Tensor], more: dict[str, torch.Tensor]) -> None:
    for key, value in more.items():
        sums[key] = sums[key] + value if key in sums else value


def _means(sums: dict[str, torch.Tensor], denominator: int) -> dict[str, float]:
    """Brings all sums over from the device at once; ``loss/total`` is 0 where there are none."""
    if not sums:
        return {"loss/total": 0.0}
    values = torch.stack([value.double() for value in sums.values()]).tolist()
    return {key: value / denominator for key, value in zip(sums, values, strict=True)}


def build_learner(config: RunConfig, device_name: str) -> Learner:
    """Seeds torch, loads the student in float32 and checks that its logits come out right."""
    torch.manual_seed(config.seed)
    device = torch.device(device_name)
    model = load_student(config, device)
    learner = Learner(model, build_loss(config.loss), config.train, device)
    learner.check()
    return learner
