"""A rank's part of the trainer's state: copied out between two steps, written and read by shards.

    model/<parameter> · optimizer/<parameter>/<moment> · rng/<rank>/<device>

Every rank copies and reads its own parts only (``trainer.saving.shards`` says in which files they
are), and no rank's part needs another's. ``TrainerState`` has all ranks do the same. A parameter
that is not trained is not stored: it is what ``student.model`` holds. Learning rates are a function
of the step (``trainer.learner``), so a schedule has no state.

``RankState`` has a rank's copy of its part, until a thread has written it beside training:

between two steps: capture ──► parts in host memory ··· write ──► this rank's file, checksum
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from secrets import token_hex
from typing import Any

import torch

from async_opd.core.errors import CheckpointError
from async_opd.core.reports import WrittenFile
from async_opd.core.stages import TRAINER
from async_opd.models.model_size import power_of_two
from trainer.offload import HostBuffers, HostMoments
from trainer.rank_group import AllRanks
from trainer.saving.shards import Part, Parts, Shards, Stamp, shard_name, write_shard
from trainer.student.sharding import own_part, own_slices, sharded_as
from trainer.student.stored_weights import StoredWeights

Tensors = dict[str, torch.Tensor]
Files = Mapping[str, WrittenFile]
COMPARED = 64
"""Numbers of each frozen parameter that are compared."""
BUFFER_BYTES = 1 << 30
"""Most of a piece of the host memory for copies: large, since a tensor that does not fit what is
left of a piece leaves that empty, and torch pins a larger tensor's in a power of two."""


def copy_parts(
    model: Any, optimizer: torch.optim.Optimizer, rank: int = 0, room: HostBuffers | None = None
) -> Parts:
    """Copies in host memory of this rank's parts of parameters, buffers and moments.

    A part that several ranks have is in the copy of one of them. Every rank adds its random states.
    ``room`` for the copies, which are valid until the next call with the same one.
    """
    parts = {}
    room = room or room_for(model, optimizer)
    room.clear()
    for name, tensor in training_state(model, optimizer):
        own = own_part(tensor.detach())
        if _writes(tensor, rank) and (own.numel() or own.shape == tensor.shape):
            copy = room.copy(own)
            if copy.dtype != own.dtype:  # its place in the buffer does not suit its dtype
                copy = own.to("cpu", copy=True).contiguous()
            parts[name] = Part(copy, own_slices(tensor), tuple(tensor.shape))
    states = {"cpu": torch.get_rng_state()}
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        states["cuda"] = torch.cuda.get_rng_state()
        torch.cuda.current_stream().synchronize()  # copies to pinned memory return before they end
    for device, state in states.items():
        parts[f"rng/{rank}/{device}"] = Part(state, own_slices(state), tuple(state.shape))
    return parts


def room_for(model: Any, optimizer: torch.optim.Optimizer) -> HostBuffers:
    """Memory for copies of this rank's parts; of a small model one piece."""
    nbytes = sum(own_part(one.detach()).nbytes for _, one in training_state(model, optimizer))
    return HostBuffers(min(power_of_two(nbytes), BUFFER_BYTES))


def load_parts(model: Any, optimizer: torch.optim.Optimizer, shards: Shards, rank: int = 0) -> None:
    """Reads this rank's parts into model, optimizer and random generators, in place.

    A rank that the checkpoint has no random state of keeps the one it has. CheckpointError, with up
    to five names, for tensors of another model.
    """
    load_model(model, shards)
    optimizer.state.clear()
    for name, parameter in model.named_parameters():
        prefix = f"optimizer/{name}/"
        moments = sorted(key for key in shards.names if key.startswith(prefix))
        if moments:
            optimizer.state[parameter] = {
                key.removeprefix(prefix): _moment(shards, key, parameter, optimizer)
                for key in moments
            }
    _load_random_states(shards, rank)


def load_model(model: Any, shards: Shards) -> None:
    """Reads this rank's parts of the model alone, in place. CheckpointError as ``load_parts``."""
    own = dict(stored_state(model))
    _refuse_other_model(own, shards)
    with torch.no_grad():
        for name, tensor in own.items():
            own_part(tensor).copy_(shards.read(f"model/{name}", own_slices(tensor)))


def frozen_digest(model: Any) -> str:
    """Distinguishes the frozen weights of models of the same shapes; '' if all weights are trained.

    It is a SHA-256 of the first numbers of each frozen parameter's first row in bfloat16 (of a
    vector one number): rank 0 has these, however many ranks share the rows.
    """
    digest = hashlib.sha256()
    frozen = [(name, p) for name, p in model.named_parameters() if not p.requires_grad]
    for name, parameter in frozen:
        own = own_part(parameter.detach())
        row = own[:1] if own.dim() else own
        first = row.reshape(-1)[:COMPARED].to("cpu", torch.bfloat16)
        digest.update(name.encode() + first.view(torch.uint8).numpy().tobytes())
    return digest.hexdigest() if frozen else ""


def refuse_other_frozen(model: Any, stamp: Stamp) -> None:
    """CheckpointError if the frozen weights are not those that the checkpoint was trained with."""
    if stamp.frozen and stamp.frozen != frozen_digest(model):
        raise CheckpointError(
            TRAINER,
            "what the checkpoint has was trained beside frozen weights of another model, of the "
            "same shapes",
            "resume with the files that student.model had when the run began",
        )


def training_state(model: Any, optimizer: Any) -> Iterator[tuple[str, torch.Tensor]]:
    """Model and optimizer tensors under their names, in the same order on every rank."""
    yield from ((f"model/{name}", tensor) for name, tensor in stored_state(model))
    for name, parameter in model.named_parameters():
        for key, value in sorted(optimizer.state.get(parameter, {}).items()):
            yield f"optimizer/{name}/{key}", value


def stored_state(model: Any) -> Iterator[tuple[str, torch.Tensor]]:
    """The model's part in a checkpoint: all, or of a partly frozen one the trained part.

    The frozen rest is read from the student's own files.
    """
    trained = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    yield from (
        trained if any(not p.requires_grad for p in model.parameters()) else model_state(model)
    )


def model_state(model: Any) -> Iterator[tuple[str, torch.Tensor]]:
    """Parameters, tied ones once, and the persistent buffers (those that a state dict has)."""
    yield from model.named_parameters()
    persistent = model.state_dict(keep_vars=True)
    yield from ((name, buffer) for name, buffer in model.named_buffers() if name in persistent)


def _writes(tensor: Any, rank: int) -> bool:
    """Whether this rank is the one that writes its part: of copies in several ranks, the first."""
    if not hasattr(tensor, "device_mesh"):
        return rank == 0
    places = zip(tensor.device_mesh.get_coordinate(), tensor.placements, strict=True)
    return all(at == 0 for at, placement in places if placement.is_replicate())


def _refuse_other_model(own: Tensors, shards: Shards) -> None:
    stored = {name.removeprefix("model/") for name in shards.names if name.startswith("model/")}
    wrong = sorted(stored ^ own.keys()) or [
        name for name, tensor in own.items() if not shards.fits(f"model/{name}", tensor)
    ]
    if wrong:
        raise CheckpointError(
            TRAINER,
            f"the checkpoint is of another model: {wrong[:5]} are missing, unknown or of another "
            "shape or type",
            "resume with the student.model and train.lora that the checkpoint was written with",
        )


def _moment(
    shards: Shards, key: str, parameter: Any, optimizer: torch.optim.Optimizer
) -> torch.Tensor:
    """A moment of the parameter, sharded by rows as the parameter is; a number is whole."""
    host = torch.device("cpu")
    shape = shards.shape(key)
    if not shape:  # torch's fused kernels alone need the number of steps on the device
        fused = optimizer.defaults.get("fused")
        return shards.read(key).to(parameter.device if fused else host, copy=True)
    home = host if isinstance(optimizer, HostMoments) else parameter.device
    if own_part(parameter) is parameter:
        return shards.read(key).to(home, copy=True)  # what is read may be the file's own pages
    own = shards.read(key, own_slices(parameter, shape))
    return sharded_as(parameter, own.to(home, copy=True), shape)


def _load_random_states(shards: Shards, rank: int) -> None:
    """``rng/<device>`` is the state that all ranks had in checkpoints of earlier versions."""
    setters = {"cpu": torch.set_rng_state}
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        setters["cuda"] = torch.cuda.set_rng_state
    for device, set_state in setters.items():
        found = shards.names & {f"rng/{rank}/{device}", f"rng/{device}"}
        for name in found:
            set_state(shards.read(name))


@dataclass(frozen=True)
class RankFile:
    """A rank's written part: its file, or the reason why there is none.

    The reason is returned and not raised: an error would end the group of ranks, and the run.
    """

    name: str
    written: WrittenFile | None
    fault: str = ""


class RankState:
    """Rank ``rank``'s part of the state, and the last copy of it that was not written yet.

    All copies are made in the same memory: new memory takes a GPU's copies twenty times as long.
    """

    def __init__(self, model: Any, optimizer: torch.optim.Optimizer, rank: int = 0) -> None:
        self._model, self._optimizer, self._rank = model, optimizer, rank
        self._room: HostBuffers | None = None
        self._stamp: Stamp | None = None
        self._parts: Parts = {}

    def capture(self, stamp: Stamp) -> int:
        """Copies weights, optimizer and random states to host memory; returns the bytes."""
        self._parts = {}  # the copy overwrites them
        self._room = self._room or room_for(self._model, self._optimizer)
        self._parts = copy_parts(self._model, self._optimizer, self._rank, self._room)
        self._stamp = stamp
        return sum(part.tensor.nbytes for part in self._parts.values())

    def write(self, folder: str) -> RankFile:
        """Writes the copy to this rank's file in the folder, and forgets it."""
        stamp, parts = self._stamp, self._parts
        self._stamp, self._parts = None, {}
        if stamp is None:
            return RankFile("", None, f"rank {self._rank} was to write without a capture before")
        name = shard_name(self._rank, stamp.ranks)
        try:
            return RankFile(name, write_shard(Path(folder), self._rank, stamp, parts))
        except CheckpointError as error:
            return RankFile(name, None, error.cause)

    def load(self, folder: str) -> Stamp:
        """Reads weights, optimizer and random states; see ``load_parts``."""
        shards = Shards(Path(folder))
        load_parts(self._model, self._optimizer, shards, self._rank)
        return shards.stamp

    def adopt(self, folder: str) -> None:
        """Reads a model's weights. Those that are not trained may be missing: they stay."""
        StoredWeights(self._model, Path(folder), whole=False).refill()


class TrainerState:
    """The state of all ranks, of which each has its part."""

    def __init__(self, ranks: AllRanks, model: Any) -> None:
        """``model``: the first rank's, whole or a shard."""
        self._ranks, self._model = ranks, model

    def capture(self, step: int, version: int, balance: str) -> int:
        """Each rank copies its part to host memory; returns the bytes of all."""
        frozen = frozen_digest(self._model)
        stamp = Stamp(step, version, self._ranks.number, token_hex(8), frozen, balance)
        return sum(self._ranks.each("state.capture", stamp))

    def write(self, folder: str) -> Files:
        """Each rank writes what it captured to the folder; runs beside the thread that trains.

        CheckpointError if one of them cannot.
        """
        # not "state.write": the rank first writes the steps that it keeps
        return all_written(self._ranks.each("write", folder))

    def load(self, folder: str) -> Stamp:
        """Each rank reads its part of the state that the folder holds. CheckpointError."""
        refuse_other_frozen(self._model, Shards(Path(folder)).stamp)
        stamps: list[Stamp] = self._ranks.each("state.load", folder)
        return stamps[0]


def all_written(files: Sequence[RankFile]) -> Files:
    """The files of all ranks by name. CheckpointError with the reasons of those without one."""
    faults = [file.fault for file in files if file.written is None]
    if faults:
        raise CheckpointError(TRAINER, "; ".join(faults))
    return {file.name: file.written for file in files if file.written is not None}
