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
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils.checkpoint import checkpoint

from async_opd.core.config import RunConfig, TrainConfig
from async_opd.core.errors import StageError
from async_opd.core.samples import Sample
from trainer.losses import LossInputs, TokenLoss, build_loss
from trainer.packing import Packed, pack, plan
from trainer.schedule import learning_rate

CHUNK_ROWS = 1024
"""Response rows whose logits are alive at the same time."""

WRAPPERS = ("_fsdp_wrapped_module.", "_orig_mod.", "_checkpoint_wrapped_module.")


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
        """One optimizer step. StageError if loss or gradient is not finite: nothing is changed."""
        started = time.perf_counter()
        self.model.train()
        response_tokens = sum(len(sample.rollout.response_ids) for sample in samples)
        sums: dict[str, float] = defaultdict(float)
        groups = plan([s.rollout.tokens for s in samples], self._train.tokens_per_micro_batch)
        for group in groups:
            packed = pack([samples[index] for index in group]).to(self._device)
            for key, value in self._backward(packed, max(response_tokens, 1)).items():
                sums[key] += value
        norm = float(
            torch.nn.utils.clip_grad_norm_(self.model.parameters(), self._train.max_grad_norm)
        )
        self._refuse_if_not_finite(sums["loss/total"], norm, samples)
        rate = learning_rate(self._step, self._train)
        for parameters in self._optimizer.param_groups:
            parameters["lr"] = rate
        self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=True)
        self._step += 1
        cut = sum(sample.rollout.finish_reason == "length" for sample in samples)
        metrics = {key: value / max(response_tokens, 1) for key, value in sums.items()}
        metrics |= {
            "train/grad_norm": norm,
            "train/lr": rate,
            "train/response_tokens": float(response_tokens),
            "train/mean_response_tokens": response_tokens / max(len(samples), 1),
            "train/truncated_share": cut / max(len(samples), 1),
            "train/micro_batches": float(len(groups)),
            "train/compute_s": time.perf_counter() - started,
        }
        return LearnerReport(metrics)

    def named_weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Current weights under their checkpoint names, in the engines' dtype.

        bfloat16 from a GPU, float32 from a CPU. A head tied to the embedding is left out, as in
        the checkpoint.
        """
        dtype = torch.bfloat16 if self._device.type == "cuda" else torch.float32
        for name, parameter in self.model.named_parameters():  # a tied head appears once
            for wrapper in WRAPPERS:
                name = name.replace(wrapper, "")
            yield name, parameter.detach().to(dtype)

    def _backward(self, packed: Packed, denominator: int) -> dict[str, float]:
        """Adds the micro-batch's gradients; returns its sums over response tokens."""
        if len(packed.rows) == 0:
            return {}
        with self._precision():
            states = self.model.model(
                input_ids=packed.input_ids, position_ids=packed.position_ids, use_cache=False
            ).last_hidden_state[0]
            rows = states[packed.rows]
            total = torch.zeros((), device=self._device)
            sums: dict[str, torch.Tensor] = {}
            for start in range(0, len(packed.rows), CHUNK_ROWS):
                chunk = slice(start, start + CHUNK_ROWS)
                loss, metrics = checkpoint(
                    self._chunk, rows[chunk], packed, chunk, use_reentrant=False
                )
                total = total + loss
                for key, value in metrics.items():
                    sums[key] = sums.get(key, 0) + value
        torch.autograd.backward(total / denominator)
        sums["loss/total"] = total.detach()
        return {key: float(value) for key, value in sums.items()}

    def _chunk(
        self, rows: torch.Tensor, packed: Packed, chunk: slice
    ) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        """Loss and metrics of a chunk of response rows [n, hidden]; logits live only in here."""
        logits = self.model.lm_head(rows).float()
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

    def _refuse_if_not_finite(self, loss: float, norm: float, samples: Sequence[Sample]) -> None:
        if math.isfinite(loss) and math.isfinite(norm):
            return
        self._optimizer.zero_grad(set_to_none=True)
        uids = ", ".join(sample.rollout.uid for sample in samples[:5])
        raise StageError(
            "trainer",
            f"step {self._step}: loss {loss}, gradient norm {norm}; batch of {len(samples)} "
            f"beginning with {uids}",
            "lower train.lr, or look for infinite teacher scores of these samples",
        )


def build_learner(config: RunConfig, device_name: str) -> Learner:
    """Loads the student in float32 and seeds torch."""
    from transformers import AutoModelForCausalLM

    torch.manual_seed(config.seed)
    device = torch.device(device_name)
    model = AutoModelForCausalLM.from_pretrained(
        config.student.model,
        dtype=torch.float32,
        attn_implementation="sdpa",
        trust_remote_code=config.student.trust_remote_code,
    )
    if config.train.gradient_checkpointing:
        model.gradient_checkpointing_enable()
    return Learner(model, build_loss(config.loss), config.train, device)
