"""One rank of the trainer: a device, the student or its shard, and the optimizer.

    micro_batches ──pack, another thread──► StudentLoss ──► gradients ──clip──► AdamW
                                       ▲ FSDP's collectives, in lock-step with the other ranks

A rank computes; the learner (``trainer.learner``), in rank 0's process, decides what a step is and
whether it is applied. Within a micro-batch the host waits for no device: the next one is packed,
and pinned, on another thread while a GPU computes. Each of the other ranks is the rank of a
``Follower`` (``trainer.build``), whose methods the learner calls.

A rank's parts: ``student`` (how it computes), ``weights`` (full tensors, which all ranks gather)
and ``state`` (what a checkpoint holds of this rank).
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass, field, replace
from functools import partial

import torch

from async_opd.core.samples import Header
from trainer.batches.batch_metrics import TurnCounts, masked_by_turn
from trainer.batches.micro_batches import Factors, MicroBatch, scaled
from trainer.batches.packing import Packed, pack
from trainer.losses.mismatch import FreshTokens, Gaps, gaps_of
from trainer.losses.report import Metrics, merged, token_sums
from trainer.notes import note
from trainer.optimizer import adamw
from trainer.recorder import Recorder
from trainer.replay.keeper import Keeper, Kept, Weights, platform_of, weights_of
from trainer.replay.kept_step import StepResult
from trainer.saving.state import RankFile, RankState
from trainer.student.named_weights import FullWeights
from trainer.student.placed import PlacedStudent
from trainer.student.sharding import full_tensor
from trainer.utilization import MemoryUse, ModelSize, memory_use, peak_tflops
from trainer.vision.images import images_of
from trainer.vision.parts import attention_of
from trainer.work_thread import ahead


@dataclass(frozen=True)
class BackwardResult:
    """The rank's ``losses.report.token_sums``; the norm of all ranks' gradients, not clipped.

    ``gaps`` of the rank's fresh tokens, if it has any. ``turns``: see ``masked_by_turn``.
    """

    sums: dict[str, float]
    norm: float
    gaps: Gaps | None = None
    turns: TurnCounts = field(default_factory=TurnCounts)


class Rank:
    """Trains a student, or its shard: gradients of micro-batches, and the optimizer's steps."""

    def __init__(self, student: PlacedStudent, wire_dtype: torch.dtype = torch.float32) -> None:
        """``wire_dtype``: that of the engines' weights, in which ``weights`` has parameters."""
        self.student, self.model = student, student.model
        self.train, self.device = student.train, student.device
        self.keeper: Keeper | None = None  # with ``log.replay``
        self.recorder: Recorder | None = None
        self.tokens = 0  # computed since the start
        self.size = ModelSize.of(self.model)
        if self.size.unknown:
            note(f"train/tflops and train/mfu are missing: {self.size.unknown}")
        self.peak_tflops = peak_tflops(self.device, student.half, self.train.peak_tflops)
        self._packing = ThreadPoolExecutor(1, "packing")
        self.optimizer = adamw(self.model, self.train, student.offloads)
        self.state = RankState(self.model, self.optimizer, student.number)
        self.weights = FullWeights(self.model, wire_dtype, self.train.lora)

    def backward(
        self,
        own: Sequence[MicroBatch],
        factors: Factors = None,
        version: int | None = None,
        oldest: int = 0,
    ) -> BackwardResult:
        """Computes the gradient of the sum of all ranks' losses, clipped to ``max_grad_norm``.

        It stays until ``apply``, also after an error. ``factors`` by uid multiply the token weights
        in the distillation loss (``batches.balance``), where tokens of versions before ``oldest``
        have none. ``version``: that of the weights, by which tokens are fresh; None if a step has
        changed them since they had it.
        """
        own = scaled(own, factors)
        if self.keeper is not None:
            self.keeper.computed = own
        if self.recorder is not None:
            self.recorder.begin()
        if self.student.sight is not None:
            self.student.sight.begin([rollout for one in own for rollout in one.rollouts])
        given = self.student.reducing_last(own)
        measured: list[FreshTokens] = []
        make = partial(self._packed, version=version, oldest=oldest)
        with closing(ahead(self._packing, make, own)) as packed:
            parts = enumerate(zip(packed, given, strict=True))
            sums = merged([self._backward(number, *one, measured) for number, one in parts])
        norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.train.max_grad_norm)
        turns = TurnCounts()
        if oldest:
            counted = (rollout for one in own if one.counts for rollout in one.rollouts)
            turns = masked_by_turn(counted, oldest)
        return BackwardResult(sums, float(full_tensor(norm)), gaps_of(measured), turns)

    def cost(self, header: Header) -> float:
        """Model FLOPs of a sample: see ``ModelSize.of_sample``."""
        dense = attention_of(self.model) in ("sdpa", "eager")
        return self.size.of_sample(header, self.image_tokens(header), dense)

    def image_tokens(self, header: Header) -> int:
        """Tokens of the sample's images; none of a student of text."""
        sight = self.student.sight
        return 0 if sight is None else sight.tokens(header.images)

    def apply(self, rate: float | None) -> MemoryUse | None:
        """Makes one optimizer step at this learning rate, none for None; frees the gradients.

        Returns the GPU memory used since the last call; None on a CPU.
        """
        if rate is not None:
            for parameters in self.optimizer.param_groups:
                parameters["lr"] = rate
            self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return memory_use(self.device)

    def keep(self, result: StepResult) -> Kept:
        """Keeps the step that was applied last; see ``trainer.replay.keeper``."""
        if self.keeper is None:
            return Kept()
        return self.keeper.keep(self.model, result, self.student.kernels())

    def platform(self) -> dict[str, str]:
        """The platform on which the rank computes."""
        return platform_of(self.model, self.device, self.student.reduces_once)

    def weight_digests(self) -> Weights:
        """Of this rank's weights, to be compared with those of a kept step."""
        return weights_of(self.model)

    def forget_moments(self) -> None:
        """Resets the optimizer: the next step is as its first one."""
        self.optimizer.state.clear()

    def free_cache(self) -> None:
        """Returns the GPU memory that torch caches, for other processes on the same GPU."""
        if self.device.type == "cuda":
            torch.cuda.empty_cache()

    def offload(self) -> None:
        """Moves weights and optimizer to host memory, between two steps; frees the GPU's.

        ``state.capture`` works there, and ``weights.exported`` of a single rank. Teachers' heads
        stay on the GPU.
        """
        self.student.move(self.optimizer, torch.device("cpu"))
        self.free_cache()

    def onload(self) -> None:
        """Moves weights and optimizer back to the rank's device."""
        self.student.move(self.optimizer, self.device)

    def write(self, folder: str) -> RankFile:
        """Writes what ``state`` has captured; called on another thread than the one that trains.

        Steps before the checkpoint are on the disk when it is.
        """
        if self.keeper is not None:
            self.keeper.settle()
        return self.state.write(folder)

    def _packed(self, micro_batch: MicroBatch, version: int | None, oldest: int) -> Packed:
        """The micro-batch as the rank computes it: in host memory, pinned for a GPU."""
        packed = pack(micro_batch.samples, micro_batch.token_weights, version, oldest)
        packed = replace(
            packed, images=images_of(self.student.sight, micro_batch.rollouts, micro_batch.images)
        )
        packed = packed if self.recorder is None else self.recorder.mark(packed, micro_batch)
        return self.student.share(packed)

    def _backward(
        self, number: int, packed: Packed, micro_batch: MicroBatch, measured: list[FreshTokens]
    ) -> Metrics:
        """Adds the micro-batch's gradients; returns sums over its response tokens, if it counts.

        Adds its fresh tokens to ``measured``, if it has any.
        """
        metrics: Metrics = {}
        there = packed.to(self.device)
        # Without rows there is nothing to compute, but of several ranks each runs every collective.
        if self.student.ranks > 1 or len(packed.rows):
            with self.student.precision():
                loss, metrics = self.student.loss(there, micro_batch.supervised)
            # FSDP averages gradients over the ranks; the token weights divide by the whole batch.
            torch.autograd.backward(loss * self.student.ranks)
        if self.recorder is not None:
            self.recorder.take(packed, micro_batch, metrics)
        self.tokens += packed.input_ids.numel()
        if not (micro_batch.counts and metrics):
            return {}
        if fresh := FreshTokens.of(number, packed.tokens, metrics):
            measured.append(fresh)
        return token_sums(metrics, there.tokens.owners, packed.owners)

    def record(self, step: int, version: int, skipped: str) -> dict[str, float]:
        """Writes what was recorded of the step; see ``Recorder.finish``."""
        assert self.recorder is not None
        return self.recorder.finish(step, version, skipped)

    def flush_records(self) -> None:
        """Waits until they are written, and the steps that are kept."""
        if self.recorder is not None:
            self.recorder.flush()
        if self.keeper is not None:
            self.keeper.settle()
