"""A model's weights as Hugging Face files, of which one at a time is in host memory.

tensors ──► model-00001-of-00003.safetensors · … · model.safetensors.index.json
        └─► model.safetensors, if they fit into one file
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path

import torch
from safetensors.torch import save_file

from async_opd.files.durable import flush
from async_opd.files.safe_open import regular_file

FILE_BYTES = 4 << 30
"""Most bytes of tensors in a file, unless a single one has more."""
INDEX = "model.safetensors.index.json"


def write_weights(
    folder: Path, weights: Iterable[tuple[str, torch.Tensor]], file_bytes: int = FILE_BYTES
) -> None:
    """Writes the tensors, in order, and flushes them to the disk. OSError, SafetensorError."""
    files: list[list[str]] = []
    held: dict[str, torch.Tensor] = {}
    total = 0
    for name, tensor in weights:
        if held and sum(one.nbytes for one in held.values()) + tensor.nbytes > file_bytes:
            files.append(_written(folder, len(files), held))
            held = {}
        # A copy: tensors that share memory, such as experts of one matrix, cannot be written.
        held[name] = tensor.detach().to("cpu", copy=True, memory_format=torch.contiguous_format)
        total += tensor.nbytes
        del tensor  # which may hold memory of a GPU while the next one is gathered
    files.append(_written(folder, len(files), held))
    if len(files) == 1:
        _part(folder, 0).rename(folder / "model.safetensors")
        return
    weight_map: dict[str, str] = {}
    for number, names in enumerate(files):
        file = f"model-{number + 1:05}-of-{len(files):05}.safetensors"
        _part(folder, number).rename(folder / file)
        weight_map |= dict.fromkeys(names, file)
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    with open(folder / INDEX, "x", encoding="utf-8", opener=regular_file) as written:
        json.dump(index, written, indent=2, sort_keys=True)


def _written(folder: Path, number: int, tensors: dict[str, torch.Tensor]) -> list[str]:
    path = _part(folder, number)
    save_file(tensors, path, metadata={"format": "pt"})
    flush(path)
    return list(tensors)


def _part(folder: Path, number: int) -> Path:
    """A file before the number of files is known."""
    return folder / f".weights-{number}.partial"
