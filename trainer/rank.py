"""One rank of the trainer: a device, the student or its shard, and the optimizer.

    micro_batches ──pack, another thread──► StudentLoss ──► gradients ──clip──► AdamW
                                       ▲ FSDP's collectives, in lock-step with the other ranks

A rank computes; the learner (``trainer.learner``), in rank 0's process, decides what a step is and
whether it is applied. Within a micro-batch the host waits for no device: the next one is packed,
and pinned, on another thread while a GPU computes. Each of the other ranks is the rank of a
``Follower`` (``trainer.build``), whose methods the learner calls.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, closing, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch

from async_opd.config.device_defaults import offloads
from async_opd.core.samples import Header
from async_opd.weight_sync.layout import HeldRow, Reference
from trainer.batches.batch_metrics import TurnCounts, masked_by_turn
from trainer.batches.micro_batches import Factors, MicroBatch, scaled
from trainer.batches.packing import Packed, Row, Vocabularies, pack
from trainer.context import ACROSS, Context
from trainer.layers import CompiledLayers
from trainer.losses.chunked import Head, objective_run
from trainer.losses.mismatch import FreshTokens, Gaps, gaps_of
from trainer.losses.objective import Objective
from trainer.losses.report import Metrics, merged, token_sums
from trainer.notes import note
from trainer.offload import move, park
from trainer.optimizer import adamw
from trainer.recorder import Recorder
from trainer.replay.keeper import Keeper, Kept, Weights, platform_of, weights_of
from trainer.replay.kept_step import StepResult
from trainer.saving.shards import Shards, Stamp
from trainer.saving.state import CapturedParts, RankFile, load_parts
from trainer.student.adapters import adapter_parameters, adapter_state, halve_frozen, plain_state
from trainer.student.loading import in_bfloat16
from trainer.student.loss_module import StudentLoss
from trainer.student.named_weights import adapter_weights, named_weights, sent_state
from trainer.student.quantization import SentMatrices
from trainer.student.reference import ROUNDING, reference_of
from trainer.student.routing import replay_routing
from trainer.student.sharding import all_reduce_once, full_tensor, reducing_last, reshard, shard
from trainer.student.stored_weights import StoredWeights
from trainer.utilization import MemoryUse, ModelSize, memory_use, peak_tflops
from trainer.vision.images import Sight, images_of
from trainer.vision.parts import attention_of
from trainer.work_thread import ahead

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

    from async_opd.config.sections.train import TrainConfig

Gathered = Literal["weights", "exported"]
"""A method of ``Rank`` that returns full tensors, for which every rank sends its shards."""


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
    """Owns float32 master weights of what is trained, and their optimizer, or its shard of both."""

    def __init__(
        self,
        model: Any,
        objective: Objective,
        train: TrainConfig,
        device: torch.device,
        heads: Mapping[str, Head] | None = None,
        mesh: DeviceMesh | None = None,
        wire_dtype: torch.dtype = torch.float32,
        fill: Callable[[], None] | None = None,
        collective_s: float = 600,
    ) -> None:
        """``heads`` are the teachers', for objectives over the whole vocabulary.

        ``wire_dtype``: that of the engines' weights, in which ``weights`` returns parameters.
        With a ``mesh`` the student is sharded over it, and ``train.context_parallel`` of its ranks
        share each row: collectives, which all its ranks call. ``fill`` reads the weights of a model
        on ``meta``, after it is sharded. ``collective_s`` bounds each exchange of shared rows.
        """
        self.train, self.device = train, device
        self._wire_dtype = wire_dtype
        self._sends_adapters = train.lora is not None and train.lora.sync == "adapter"
        self.half = in_bfloat16(train.dtype, device)
        offload = offloads(train, device.type)
        self._on_host = offload == "parameters"
        self._autocast = self.half and mesh is None  # FSDP casts the parameters that it gathers
        self.ranks, self._number = (1, 0) if mesh is None else (mesh.size(), mesh.get_rank())
        self._captured = CapturedParts(self._number)
        self.keeper: Keeper | None = None  # with ``log.replay``
        self.layers: CompiledLayers | None = None  # with ``train.compile``
        self._objective = objective
        self.sight: Sight | None = None  # of a VLM student
        self.sent: SentMatrices | None = None  # with ``sync.fake_quantization``
        self.tokens = 0  # computed since the start
        self.size = ModelSize.of(model)
        if self.size.unknown:
            note(f"train/tflops and train/mfu are missing: {self.size.unknown}")
        self.peak_tflops = peak_tflops(device, self.half, train.peak_tflops)
        # Dropout and router noise stay off: the engines sampled without them.
        model.eval()
        if mesh is None:
            self._load(model, fill)
        self.model = model
        self.recorder: Recorder | None = None
        self._packing = ThreadPoolExecutor(1, "packing")
        self._context = Context.join(train.context_parallel, collective_s)
        self._student_loss = self._loss_of(objective, heads or {})
        rows = self._student_loss.vocabulary
        common = {name: min(rows, head.vocabulary) for name, head in (heads or {}).items()}
        self.vocabularies = Vocabularies(rows, common)
        if mesh is not None:
            self._shard(mesh, fill)
        if self._context is not None:
            self._context.set_attention(model)
        several = self.ranks > 1  # a single one has nothing to add up, also where FSDP offloads it
        self.reduces_once = several and all_reduce_once(train, self._student_loss, device)
        self.optimizer = adamw(model, train, offload)

    def _load(self, model: Any, fill: Callable[[], None] | None) -> None:
        """Reads the weights of a student that is not sharded; moves it to the rank's device."""
        if fill is not None:
            fill()
        if self.half:
            halve_frozen(model)
        model.to(self.device)

    def _loss_of(self, objective: Objective, heads: Mapping[str, Head]) -> StudentLoss:
        """The student and its objective as one module."""
        compute = torch.bfloat16 if self.half else None
        over_ranks = None if self._context is None else self._context.sum
        student_loss = StudentLoss(self.model, objective, heads, compute, over_ranks)
        if self.train.routing == "replay":
            student_loss.replay = replay_routing(self.model)
        return student_loss

    def _shard(self, mesh: DeviceMesh, fill: Callable[[], None] | None) -> None:
        """Shards the student over the mesh, then reads each rank's part of the weights."""
        if self.half:
            halve_frozen(self.model)
        shard(self._student_loss, mesh, bfloat16=self.half, offload=self._on_host)
        if fill is not None:
            fill()
        if self._on_host:
            park(self._student_loss)

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
        if self.sight is not None:
            self.sight.begin([rollout for one in own for rollout in one.rollouts])
        given = reducing_last(self._student_loss, own) if self.reduces_once else own
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
        return self.sight.tokens(header.images) if self.sight else 0

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
        return self.keeper.keep(self.model, result, self.kernels())

    def kernels(self) -> dict[str, str]:
        """Which parts of a step run ``compiled``, and which ``eager``: by times that differ."""
        run = objective_run(self._objective, self.device.type)
        parts = {"objective": run, "decoder layers": self.layers}
        return {
            name: "compiled" if one is not None and one.is_compiled else "eager"
            for name, one in parts.items()
        }

    def platform(self) -> dict[str, str]:
        """The platform on which the rank computes."""
        return platform_of(self.model, self.device, self.reduces_once)

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

        ``capture`` works there, and ``exported`` of a single rank. Teachers' heads stay on the GPU.
        """
        if not self._on_host:
            move(self._student_loss, self.optimizer, torch.device("cpu"))
        self.free_cache()

    def onload(self) -> None:
        """Moves weights and optimizer back to the rank's device."""
        if not self._on_host:
            move(self._student_loss, self.optimizer, self.device)

    def reference(self, rows: Sequence[HeldRow]) -> Reference:
        """Log-probabilities of held rows; every rank computes all of them."""
        rounding = ROUNDING[torch.bfloat16 if self.half else torch.float32]
        return reference_of(
            self.model, self.logits, rows, rounding, self.sight, self.layers, self.sent
        )

    # ── its part of the state: nothing here communicates ───────────────────────────────────────

    def capture(self, stamp: Stamp) -> int:
        """Copies weights, optimizer and random states to host memory; returns the bytes."""
        return self._captured.capture(self.model, self.optimizer, stamp)

    def write(self, folder: str) -> RankFile:
        """Writes what was captured; called on another thread than the one that trains.

        Steps before the checkpoint are on the disk when it is.
        """
        if self.keeper is not None:
            self.keeper.settle()
        return self._captured.write(folder)

    def load(self, folder: str) -> Stamp:
        """Reads weights, optimizer and random states; see ``trainer.saving.state.load_parts``."""
        shards = Shards(Path(folder))
        load_parts(self.model, self.optimizer, shards, self._number)
        return shards.stamp

    def adopt(self, folder: str) -> None:
        """Reads a model's weights. Those that are not trained may be missing: they stay."""
        StoredWeights(self.model, Path(folder), whole=False).refill()

    # ── weights: rank 0 gathers full tensors, the other ranks join each gather ─────────────────

    def weights(self, copied: bool = True) -> Iterator[tuple[str, torch.Tensor]]:
        """The full weights under their checkpoint names, in the engines' dtype: named_weights.

        Of adapters alone where the engines apply them (``train.lora.sync``).
        """
        if self._sends_adapters:
            return adapter_weights(self.model, self._wire_dtype, copied)
        return named_weights(self.model, self._wire_dtype, copied, changing=True)

    def exported(self, dtype: torch.dtype) -> Iterator[tuple[str, torch.Tensor]]:
        """The full weights in ``dtype``, adapters merged; then the adapters as they are.

        Each is valid until the next. Adapters come under the names of their parameters.
        """
        yield from named_weights(self.model, dtype, copied=False)
        for name, tensor in adapter_parameters(self.model):
            yield name, full_tensor(tensor.detach())

    def join_gather(self, what: Gathered, dtype: torch.dtype | None = None) -> None:
        """Sends this rank's shards, in ``dtype`` or the engines', while rank 0 runs ``what``."""
        state = adapter_state if self._sends_adapters else sent_state
        for _, tensor in (state if what == "weights" else plain_state)(self.model):
            full_tensor(tensor.detach().to(dtype or self._wire_dtype))
        if what == "exported":
            for _, tensor in adapter_parameters(self.model):
                full_tensor(tensor.detach())

    def _packed(self, micro_batch: MicroBatch, version: int | None, oldest: int) -> Packed:
        """The micro-batch as the rank computes it: in host memory, pinned for a GPU."""
        packed = pack(micro_batch.samples, micro_batch.token_weights, version, oldest)
        packed = replace(
            packed, images=images_of(self.sight, micro_batch.rollouts, micro_batch.images)
        )
        packed = packed if self.recorder is None else self.recorder.mark(packed, micro_batch)
        packed = packed if self._context is None else self._context.share(packed)
        return packed if self.device.type == "cpu" else packed.pinned()

    def _backward(
        self, number: int, packed: Packed, micro_batch: MicroBatch, measured: list[FreshTokens]
    ) -> Metrics:
        """Adds the micro-batch's gradients; returns sums over its response tokens, if it counts.

        Adds its fresh tokens to ``measured``, if it has any.
        """
        metrics: Metrics = {}
        there = packed.to(self.device)
        # Without rows there is nothing to compute, but of several ranks each runs every collective.
        if self.ranks > 1 or len(packed.rows):
            with self.precision():
                loss, metrics = self._student_loss(there, micro_batch.supervised)
            # FSDP averages gradients over the ranks; the token weights divide by the whole batch.
            torch.autograd.backward(loss * self.ranks)
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

    def logits(self, row: Row) -> torch.Tensor:
        """Logits [T, V] of all tokens of a row, as they are computed in training; a collective."""
        across = self._context if attention_of(self.model) == ACROSS else None
        own = row if across is None else across.share(row)
        with torch.no_grad(), self.precision():
            logits, _ = self._student_loss(own.to(self.device))
        reshard(self._student_loss)
        if across is not None:
            logits = across.gather(logits, row.input_ids.numel())
        return logits  # type: ignore[no-any-return]

    def precision(self) -> AbstractContextManager[Any]:
        """The context of the forward pass: autocast to bfloat16, or nothing."""
        if self._autocast:
            return torch.autocast(self.device.type, dtype=torch.bfloat16)
        return nullcontext()
