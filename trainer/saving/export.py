"""Writes the trained student as a Hugging Face directory that transformers and vLLM load.

tensors ──► model-00001-of-00003.safetensors · … · model.safetensors.index.json
        └─► model.safetensors, if they fit into one file

One file's tensors at a time are in host memory.

A checkpoint's student is exported on the CPU, without any other rank:

student.model ──► model ◄── trainer-0-of-N.safetensors …        model ──► config.json, weights, …
"""

from __future__ import annotations

import copy
import json
import shutil
import warnings
from collections.abc import Iterable, Iterator
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors.torch import save_file

from async_opd.core.errors import CheckpointError
from async_opd.core.printable import on_one_line
from async_opd.files.durable import flush, without_space
from async_opd.files.safe_open import FOLDER_MODE, regular_file, remove_tree
from async_opd.models.json_files import read_json
from async_opd.models.model_size import ModelSize
from async_opd.models.own_files import foreign, is_part, own_file, texts
from async_opd.models.tokenizer import text_settings
from trainer.saving.shards import Shards
from trainer.saving.state import load_model, refuse_other_frozen
from trainer.student.adapters import LORA, adapter_parameters, write_adapter
from trainer.student.loading import empty_student, fill_student
from trainer.student.named_weights import named_weights

if TYPE_CHECKING:
    from async_opd.config.run_config import RunConfig
    from async_opd.config.sections.train import ExportDtype

ADAPTER_FOLDER = "adapter"
NOT_COPIED = ("config.json", "*.index.json", "hf_quant_config.json")
"""Files that are written here, and one that says how weights are quantized, which these are not.
All other parts of a model but weights are copied: tokenizer, generation config, model code."""
TEXT_BYTES = 1 << 30
"""Most that these have together: larger ones are left out. Tokenizers have some 50 MB."""
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


def export_dtype(wanted: ExportDtype, source: str) -> torch.dtype:
    """The precision of ``train.export_dtype``; ``auto`` is that of the source's config.json."""
    if wanted == "auto":
        settings = text_settings(read_json(Path(source) / "config.json"))
        of_source = str(settings.get("dtype") or settings.get("torch_dtype"))
        wanted = "bfloat16" if of_source in ("bfloat16", "float16") else "float32"
    return torch.bfloat16 if wanted == "bfloat16" else torch.float32


def fault_of_saving(
    model: Any,
    source: str,
    directory: str,
    weights: Iterable[tuple[str, torch.Tensor]],
    dtype: torch.dtype,
) -> Exception | None:
    """Runs ``save_model``; takes all ``weights``, also after an error, which it returns.

    Other ranks join each gather. An error of the weights themselves is raised.
    """
    gathered = False

    def taken() -> Iterator[tuple[str, torch.Tensor]]:
        nonlocal gathered
        yield from weights
        gathered = True

    given = taken()
    try:
        save_model(model, source, directory, given, dtype)
    except Exception as error:
        for _ in given:
            pass
        if not gathered:
            raise
        return error
    return None


def save_model(
    model: Any,
    source: str,
    directory: str,
    weights: Iterable[tuple[str, torch.Tensor]],
    dtype: torch.dtype = torch.float32,
    file_bytes: int = FILE_BYTES,
) -> None:
    """Writes weights and config, and copies the source's other files; complete or not at all.

        write <name>.part ──► rename <name> to <name>.old ──► rename ──► remove <name>.old

    All is flushed to the disk before it has its name. An existing directory is replaced, and a
    complete model is on the disk at every moment; after an error it is the one before. ``weights``
    are in ``dtype``, under the names of a checkpoint, and are written as they come: one file of
    them is in memory. Adapters among them come under the names of their parameters, and are
    written to a PEFT directory in ``ADAPTER_FOLDER``.
    """
    target = Path(directory)
    part = target.with_name(target.name + ".part")
    old = target.with_name(target.name + ".old")
    remove_tree(part)
    try:
        part.mkdir(mode=FOLDER_MODE, parents=True)
        adapters: dict[str, torch.Tensor] = {}
        write_weights(part, _without_adapters(model, weights, adapters), file_bytes)
        _write_config(model, part, dtype)
        if adapters:
            write_adapter(model, source, adapters, part / ADAPTER_FOLDER)
        _copy_rest(Path(source), part)
        for path in (*part.rglob("*"), part):
            flush(path)
        if target.exists():
            remove_tree(old)
            target.rename(old)
        try:
            part.rename(target)
        except OSError:
            if old.exists():
                old.rename(target)
            raise
        flush(target.parent)
    finally:
        remove_tree(part)
    remove_tree(old)


def _without_adapters(
    model: Any, weights: Iterable[tuple[str, torch.Tensor]], adapters: dict[str, torch.Tensor]
) -> Iterator[tuple[str, torch.Tensor]]:
    """The weights that are written to the model's files; adapters are put aside."""
    ignored = getattr(model, "_keys_to_ignore_on_save", None) or ()
    for name, tensor in weights:
        if LORA in name:
            adapters[name] = tensor.cpu()
        elif name not in ignored:
            yield name, tensor


def _write_config(model: Any, folder: Path, dtype: torch.dtype) -> None:
    """Writes what ``save_pretrained`` writes beside weights, with the dtype of the files."""
    config = copy.deepcopy(model.config)
    for settings in (config, config.get_text_config()):
        settings.dtype = str(dtype).removeprefix("torch.")
    config.architectures = [type(model).__name__]
    if model.is_remote_code():
        from transformers.dynamic_module_utils import custom_object_save

        custom_object_save(model, folder, config=config)
    config.save_pretrained(folder)
    if model.can_generate():
        model.generation_config.save_pretrained(folder)


def _copy_rest(source: Path, part: Path) -> None:
    """Copies the source's files but weights and config; of its folders only the templates.

    A file whose name no part of a model has is not copied, as in an export of the model. A link to
    a file outside of the source is not copied, with a warning, nor is a file that is too large,
    which would fill the disk in the place of the trained model.
    """
    files = ((own_file(file, source), file.relative_to(source)) for file in texts(source))
    parts = ((real, name) for real, name in files if real and is_part(name.name))
    own = [(real, name) for real, name in parts if not any(map(name.match, NOT_COPIED))]
    sizes = {name: real.stat().st_size for real, name in own}
    shown, left = on_one_line(str(source)), TEXT_BYTES
    for real, name in sorted(own, key=lambda one: sizes[one[1]]):
        left -= sizes[name]
        if left < 0:
            words = f"with its smaller files it has more than {TEXT_BYTES} bytes"
            warnings.warn(f"not copied from {shown}: {str(name)!r}, {words}", stacklevel=2)
            continue
        (part / name).parent.mkdir(mode=FOLDER_MODE, exist_ok=True)
        with real.open("rb") as read, (part / name).open("wb") as written:
            shutil.copyfileobj(read, written)
    left_out = foreign(source)
    if left_out:
        names = ", ".join(repr(str(file.relative_to(source))) for file in left_out)
        warnings.warn(f"not copied from {shown}, links out of it: {names}", stacklevel=2)


def export_checkpoint(config: RunConfig, checkpoint: Path, directory: Path) -> None:
    """Writes what the run of this config had as its student at the checkpoint, adapters merged.

    It takes host memory for the student's weights. CheckpointError for a checkpoint of another
    model, or of adapters over other weights, and if the disk has no space for the model.
    """
    source = config.student.model
    dtype = export_dtype(config.train.export_dtype, source)
    floats = ModelSize.of_weights(source).floats
    if figures := without_space(floats * dtype.itemsize, directory):
        remedy = "make space there, or name a directory on another disk"
        raise CheckpointError("export", f"the model would have {figures}", remedy)
    student, device = empty_student(config, torch.device("cpu")), torch.device("cpu")
    fill_student(student, config, device, None)
    model, shards = student.model, Shards(checkpoint)
    load_model(model, shards)
    refuse_other_frozen(model, shards.stamp)
    weights = chain(named_weights(model, dtype, copied=False), adapter_parameters(model))
    save_model(model, source, str(directory), weights, dtype)
