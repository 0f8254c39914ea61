"""The student in its place: on a rank's device, in the precision of training, whole or a shard.

    model ──weights, device or shards, precision, attention──► PlacedStudent ──► loss, logits

It computes what its rank is given, and knows nothing of steps (``trainer.rank``).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any, TypeVar

import torch

from async_opd.config.device_defaults import offloads
from async_opd.weight_sync.layout import HeldRow, Reference
from trainer.batches.packing import Packed, Row, Vocabularies
from trainer.context import ACROSS, Context
from trainer.layers import compile_layers
from trainer.losses.chunked import Head, objective_run
from trainer.losses.objective import Objective
from trainer.offload import move, park
from trainer.student.adapters import halve_frozen
from trainer.student.loading import in_bfloat16
from trainer.student.loss_module import StudentLoss
from trainer.student.quantization import SentMatrices
from trainer.student.reference import ROUNDING, reference_of
from trainer.student.sharding import all_reduce_once, reducing_last, reshard, shard
from trainer.vision.images import Sight
from trainer.vision.parts import attention_of

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

    from async_opd.config.sections.train import TrainConfig

T = TypeVar("T")


class PlacedStudent:
    """Float32 master weights of what is trained, or a shard of them, and how they compute."""

    def __init__(
        self,
        model: Any,
        objective: Objective,
        train: TrainConfig,
        device: torch.device,
        heads: Mapping[str, Head] | None = None,
        mesh: DeviceMesh | None = None,
        fill: Callable[[], None] | None = None,
        collective_s: float = 600,
    ) -> None:
        """``heads`` are the teachers', for objectives over the whole vocabulary.

        With a ``mesh`` the student is sharded over it, and ``train.context_parallel`` of its ranks
        share each row: collectives, which all its ranks call. ``fill`` reads the weights of a model
        on ``meta``, after it is sharded. ``collective_s`` bounds each exchange of shared rows.
        """
        self.model, self.train, self.device = model, train, device
        self.half = in_bfloat16(train.dtype, device)
        self.offloads = offloads(train, device.type)
        self._autocast = self.half and mesh is None  # FSDP casts the parameters that it gathers
        self.ranks, self.number = (1, 0) if mesh is None else (mesh.size(), mesh.get_rank())
        self.sight: Sight | None = None  # of a VLM student
        self.sent: SentMatrices | None = None  # with ``sync.fake_quantization``
        self._objective = objective
        # Dropout and router noise stay off: the engines sampled without them.
        model.eval()
        if mesh is None:
            self._load(fill)
        self._context = Context.join(train.context_parallel, collective_s)
        compute = torch.bfloat16 if self.half else None
        over_ranks = None if self._context is None else self._context.sum
        replays = train.routing == "replay"
        self.loss = StudentLoss(model, objective, heads or {}, compute, over_ranks, replays)
        rows = self.loss.vocabulary
        common = {name: min(rows, head.vocabulary) for name, head in (heads or {}).items()}
        self.vocabularies = Vocabularies(rows, common)
        if mesh is not None:
            self._shard(mesh, fill)
        if self._context is not None:
            self._context.set_attention(model)
        # not ``auto``, which is left where the student's files are not on the driver's machine
        self.layers = compile_layers(model) if train.compile is True else None
        several = self.ranks > 1  # a single one has nothing to add up, also where FSDP offloads it
        self.reduces_once = several and all_reduce_once(train, self.loss, device)

    def _load(self, fill: Callable[[], None] | None) -> None:
        """Reads the weights of a student that is not sharded; moves it to the rank's device."""
        if fill is not None:
            fill()
        if self.half:
            halve_frozen(self.model)
        self.model.to(self.device)

    def _shard(self, mesh: DeviceMesh, fill: Callable[[], None] | None) -> None:
        """Shards the student over the mesh, then reads each rank's part of the weights."""
        if self.half:
            halve_frozen(self.model)
        on_host = self.offloads == "parameters"
        shard(self.loss, mesh, bfloat16=self.half, offload=on_host)
        if fill is not None:
            fill()
        if on_host:
            park(self.loss)

    def move(self, optimizer: torch.optim.Optimizer, device: torch.device) -> None:
        """Moves its tensors and the optimizer's to a device; none that FSDP offloads."""
        if self.offloads != "parameters":
            move(self.loss, optimizer, device)

    def share(self, packed: Packed) -> Packed:
        """The rank's share of a packed row: in host memory, pinned for a GPU."""
        packed = packed if self._context is None else self._context.share(packed)
        return packed if self.device.type == "cpu" else packed.pinned()

    def reducing_last(self, given: Sequence[T]) -> Iterable[T]:
        """The micro-batches of a step, of which the last reduces gradients if all do it once."""
        return reducing_last(self.loss, given) if self.reduces_once else given

    def logits(self, row: Row) -> torch.Tensor:
        """Logits [T, V] of all tokens of a row, as they are computed in training; a collective."""
        across = self._context if attention_of(self.model) == ACROSS else None
        own = row if across is None else across.share(row)
        with torch.no_grad(), self.precision():
            logits, _ = self.loss(own.to(self.device))
        reshard(self.loss)
        if across is not None:
            logits = across.gather(logits, row.input_ids.numel())
        return logits  # type: ignore[no-any-return]

    def reference(self, rows: Sequence[HeldRow]) -> Reference:
        """Log-probabilities of held rows; every rank computes all of them."""
        rounding = ROUNDING[torch.bfloat16 if self.half else torch.float32]
        return reference_of(
            self.model, self.logits, rows, rounding, self.sight, self.layers, self.sent
        )

    def kernels(self) -> dict[str, str]:
        """Which parts of a step run ``compiled``, and which ``eager``: by times that differ."""
        run = objective_run(self._objective, self.device.type)
        parts = {"objective": run, "decoder layers": self.layers}
        return {
            name: "compiled" if one is not None and one.is_compiled else "eager"
            for name, one in parts.items()
        }

    def precision(self) -> AbstractContextManager[Any]:
        """The context of the forward pass: autocast to bfloat16, or nothing."""
        if self._autocast:
            return torch.autocast(self.device.type, dtype=torch.bfloat16)
        return nullcontext()
