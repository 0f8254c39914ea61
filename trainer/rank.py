"""One rank of the trainer: a device, the student or its shard, and the optimizer.

    micro_batches ──pack──► StudentLoss ──► gradients ──clip──► AdamW
                        ▲ FSDP's collectives, in lock-step with the other ranks

It computes what it is told to; what a step is and whether it counts is the learner's business
(``trainer.learner``), in rank 0. The other ranks are ``Follower``s of their learner's orders.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from async_opd.core.samples import Sample
from trainer.batches.packing import Packed, pack
from trainer.batches.token_weights import TokenWeight
from trainer.losses import Head, Objective
from trainer.losses.report import Metrics
from trainer.saving.state import Tensors, copy_state, join_state_gather, load_state, model_state
from trainer.student.loss_module import StudentLoss
from trainer.student.named_weights import named_weights
from trainer.student.sharding import full_tensor, join_gather, shard

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

    from async_opd.config.run_config import TrainConfig


@dataclass(frozen=True)
class MicroBatch:
    """A micro-batch. One that does not count keeps its rank in step with the others."""

    samples: tuple[Sample, ...]
    token_weights: tuple[TokenWeight, ...]
    counts: bool = True

    @property
    def nbytes(self) -> int:
        """Bytes of the samples' arrays."""
        return sum(sample.nbytes for sample in self.samples)


@dataclass(frozen=True)
class BackwardResult:
    """Values of the response tokens of each part, and the gradient's global norm before clipping.

    The norm is the same on all ranks.
    """

    reports: tuple[Metrics, ...]
    norm: float


class Rank:
    """Owns float32 master weights and their optimizer, or its shard of them."""

    def __init__(
        self,
        model: Any,
        objective: Objective,
        train: TrainConfig,
        device: torch.device,
        heads: Mapping[str, Head] | None = None,
        mesh: DeviceMesh | None = None,
    ) -> None:
        """With a ``mesh`` the student is sharded over it: then all ranks do the same."""
        self.device = device
        self._train = train
        half = train.dtype == "bfloat16" or (train.dtype == "auto" and device.type == "cuda")
        self._autocast = half and mesh is None  # FSDP casts what it gathers
        self._ranks = 1 if mesh is None else mesh.size()
        self.tokens = 0  # computed since the start
        model.eval()  # for good: what is random in training mode no engine has sampled with
        self.model = model.to(device) if mesh is None else model
        compute = torch.bfloat16 if half else None
        self._student_loss = StudentLoss(model, objective, heads or {}, compute)
        self.vocabulary = self._student_loss.vocabulary
        if mesh is not None:
            shard(self._student_loss, mesh, bfloat16=half)
        self.optimizer = _adamw(model, train)

    def backward(self, micro_batches: Sequence[MicroBatch]) -> BackwardResult:
        """Gradients of the sum of the parts' losses, over all ranks, clipped."""
        self.clear()
        reports = tuple(self._backward_counted(micro_batch) for micro_batch in micro_batches)
        norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), self._train.max_grad_norm)
        return BackwardResult(reports, float(full_tensor(norm)))

    def _backward_counted(self, micro_batch: MicroBatch) -> Metrics:
        """What a micro-batch computed; its tokens are a sign of life."""
        metrics = self._backward(micro_batch)
        self.tokens += sum(sample.rollout.tokens for sample in micro_batch.samples)
        return metrics

    def apply(self, rate: float | None) -> None:
        """One step of the optimizer with this learning rate, or none; forgets the gradients."""
        if rate is not None:
            for parameters in self.optimizer.param_groups:
                parameters["lr"] = rate
            self.optimizer.step()
        self.clear()

    def clear(self) -> None:
        """Forgets the gradients."""
        self.optimizer.zero_grad(set_to_none=True)

    def free_cache(self) -> None:
        """Gives memory of past steps back to the GPU, for others on it."""
        if self.device.type == "cuda":
            torch.cuda.empty_cache()

    # ── weights and state: rank 0 takes them, the others lend theirs ───────────────────────────

    def weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Copies of the whole weights under their checkpoint names, in the engines' dtype."""
        return named_weights(self.model, self._wire_dtype)

    def join_weights_gather(self) -> None:
        """What ``weights`` takes of another rank."""
        join_gather(
            parameter.detach().to(self._wire_dtype) for parameter in self.model.parameters()
        )

    def state(self) -> Tensors:
        """A copy of weights, optimizer and random states in host memory."""
        return copy_state(self.model, self.optimizer)

    def join_state_gather(self) -> None:
        """What ``state`` takes of another rank."""
        join_state_gather(self.model, self.optimizer)

    def full_state(self) -> Tensors | None:
        """The whole student in host memory, by its parameters' names; None if it is not sharded."""
        if self._ranks == 1:
            return None
        return {name: full_tensor(t.detach()).cpu() for name, t in model_state(self.model)}

    def join_full_state_gather(self) -> None:
        """What ``full_state`` takes of another rank."""
        join_gather(tensor.detach() for _, tensor in model_state(self.model))

    def load(self, tensors: Tensors) -> None:
        """The state of then; ranks but the first get its outline only."""
        load_state(self.model, self.optimizer, tensors)

    @property
    def _wire_dtype(self) -> torch.dtype:
        return torch.bfloat16 if self.device.type == "cuda" else torch.float32

    def _backward(self, micro_batch: MicroBatch) -> Metrics:
        """Adds the part's gradients; returns the values of its response tokens."""
        packed = pack(micro_batch.samples, micro_batch.token_weights)
        if self._ranks == 1 and len(packed.rows) == 0:
            return {}
        loss, metrics = self._loss(packed.to(self.device))
        torch.autograd.backward(loss * self._ranks)  # FSDP averages; the shares divide already
        return metrics if micro_batch.counts else {}

    def _loss(self, packed: Packed) -> tuple[torch.Tensor, Metrics]:
        with self.precision():
            return self._student_loss(packed)  # type: ignore[no-any-return]

    def precision(self) -> AbstractContextManager[Any]:
        """Of the forward pass."""
        if self._autocast:
            return torch.autocast(self.device.type, dtype=torch.bfloat16)
        return nullcontext()


class Follower:
    """A rank but the first, in a process of its own: does what rank 0 orders."""

    def __init__(self, rank: Rank) -> None:
        self._rank = rank
        self._micro_batches: list[MicroBatch] = []

    async def take(self, micro_batches: Sequence[MicroBatch]) -> None:
        """More of what it will compute in the next ``backward``: a step's parts may be large."""
        self._micro_batches += micro_batches

    async def backward(self) -> BackwardResult:
        """See Rank.backward, of what it has taken; the values come in host memory."""
        micro_batches, self._micro_batches = self._micro_batches, []
        computed = await asyncio.to_thread(self._rank.backward, micro_batches)
        reports = ({k: v.cpu() for k, v in report.items()} for report in computed.reports)
        return BackwardResult(tuple(reports), computed.norm)

    async def apply(self, rate: float | None) -> None:
        """See Rank.apply."""
        await asyncio.to_thread(self._rank.apply, rate)

    async def join_weights_gather(self) -> None:
        """See Rank.join_weights_gather."""
        await asyncio.to_thread(self._rank.join_weights_gather)

    async def join_state_gather(self) -> None:
        """See Rank.join_state_gather."""
        await asyncio.to_thread(self._rank.join_state_gather)

    async def join_full_state_gather(self) -> None:
        """See Rank.join_full_state_gather."""
        await asyncio.to_thread(self._rank.join_full_state_gather)

    async def load(self, tensors: Tensors) -> None:
        """See Rank.load."""
        await asyncio.to_thread(self._rank.load, tensors)

    async def free_cache(self) -> None:
        """See Rank.free_cache."""
        await asyncio.to_thread(self._rank.free_cache)


def _adamw(model: Any, train: TrainConfig) -> torch.optim.AdamW:
    """Weight decay on matrices only."""
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    groups = [
        {"params": [p for p in trained if p.ndim >= 2], "weight_decay": train.weight_decay},
        {"params": [p for p in trained if p.ndim < 2], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=train.lr, betas=train.betas, fused=True)
