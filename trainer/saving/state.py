"""The trainer's part of a checkpoint: two safetensors files; reading them unpickles nothing.

    trainer.safetensors   model/<parameter> · optimizer/<parameter>/<moment> · rng/<device>
                          and in its metadata the optimizer step and the weight version
    scored.safetensors    samples that are scored and not trained, with their teachers' scores

Learning rates are a function of the step (``trainer.schedule``): there is no schedule to store.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from async_opd.core.errors import CheckpointError
from async_opd.core.samples import Sample
from trainer.saving.sample_file import read_samples, write_samples
from trainer.student.sharding import full_tensor, shard_like

Tensors = dict[str, torch.Tensor]
FORMAT_ERRORS = (AttributeError, KeyError, TypeError, ValueError)
"""Errors of reading a safetensors file that ``write_state`` did not write."""
STATE_FILE, SCORED_FILE = "trainer.safetensors", "scored.safetensors"


@dataclass(frozen=True)
class TrainerState:
    """A copy of the trainer's state in host memory; later steps do not change it."""

    step: int
    version: int
    tensors: Tensors
    samples: tuple[Sample, ...]


def copy_state(model: Any, optimizer: torch.optim.Optimizer) -> Tensors:
    """Parameters, persistent buffers, optimizer moments and random states, copied to the host.

    All are full tensors, so that any number of ranks can load them. If the model is sharded, every
    other rank gathers its ``training_state`` meanwhile.
    """
    tensors = {
        name: full_tensor(tensor.detach()).to("cpu", copy=True).contiguous()
        for name, tensor in training_state(model, optimizer)
    }
    tensors["rng/cpu"] = torch.get_rng_state()
    if next(model.parameters()).is_cuda:
        tensors["rng/cuda"] = torch.cuda.get_rng_state()
    return tensors


def load_state(model: Any, optimizer: torch.optim.Optimizer, tensors: Tensors) -> None:
    """Writes the tensors of ``copy_state`` into model, optimizer and random generators, in place.

    Of a sharded model every other rank calls it meanwhile, with the ``state_shapes`` of rank 0's
    tensors. CheckpointError, with up to five names, for tensors of another model.
    """
    own = dict(stored_state(model))
    stored = {name.removeprefix("model/") for name in tensors if name.startswith("model/")}
    wrong = sorted(stored ^ set(own)) or [
        name for name, tensor in own.items() if tensor.shape != tensors[f"model/{name}"].shape
    ]
    if wrong:
        raise CheckpointError(
            "trainer",
            f"the checkpoint is of another model: {wrong[:5]} are missing, unknown or of another "
            "shape",
            "resume with the student.model and train.lora that the checkpoint was written with",
        )
    with torch.no_grad():
        for name, tensor in own.items():
            tensor.copy_(shard_like(tensors[f"model/{name}"], tensor))
    for name, parameter in model.named_parameters():
        prefix = f"optimizer/{name}/"
        moments = {key.removeprefix(prefix): key for key in tensors if key.startswith(prefix)}
        if moments:
            optimizer.state[parameter] = {
                moment: shard_like(tensors[key], parameter)
                if tensors[key].ndim
                else tensors[key].to(parameter.device, copy=True)
                for moment, key in sorted(moments.items())
            }
    torch.set_rng_state(tensors["rng/cpu"])
    if "rng/cuda" in tensors and next(model.parameters()).is_cuda:
        torch.cuda.set_rng_state(tensors["rng/cuda"])


def state_shapes(model: Any, tensors: Tensors) -> Tensors:
    """What ranks 1 … N-1 give to ``load_state``: sharded tensors on ``meta``, the others whole."""
    parts = {f"model/{name}" for name, _ in model.named_parameters()}
    return {
        name: t.to("meta") if t.ndim and (name in parts or name.startswith("optimizer/")) else t
        for name, t in tensors.items()
    }


def write_state(folder: Path, state: TrainerState, samples: Sequence[Sample]) -> None:
    """Writes both files. CheckpointError if they cannot be written."""
    numbers = {"step": str(state.step), "version": str(state.version)}
    try:
        save_file(state.tensors, folder / STATE_FILE, metadata=numbers)
        write_samples(folder / SCORED_FILE, samples)
    except (OSError, SafetensorError) as error:
        raise CheckpointError("trainer", f"{folder} cannot be written: {error}") from error


def read_state(folder: Path) -> TrainerState:
    """Reads both files. CheckpointError if ``write_state`` did not write them."""
    try:
        with safe_open(folder / STATE_FILE, "pt") as file:
            numbers = file.metadata()
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        samples = tuple(read_samples(folder / SCORED_FILE))
        return TrainerState(int(numbers["step"]), int(numbers["version"]), tensors, samples)
    except (OSError, SafetensorError, *FORMAT_ERRORS) as error:
        kind = type(error).__name__
        raise CheckpointError("trainer", f"{folder} cannot be read: {kind}: {error}") from error


def training_state(model: Any, optimizer: Any) -> Iterator[tuple[str, torch.Tensor]]:
    """Model and optimizer tensors under their names, in the same order on every rank."""
    yield from ((f"model/{name}", tensor) for name, tensor in stored_state(model))
    for name, parameter in model.named_parameters():
        for key, value in sorted(optimizer.state.get(parameter, {}).items()):
            yield f"optimizer/{name}/{key}", value


def stored_state(model: Any) -> Iterator[tuple[str, torch.Tensor]]:
    """What a checkpoint has of the model: all, or of a partly frozen one what is trained.

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
