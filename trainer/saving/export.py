"""Writes the trained student as a Hugging Face directory that transformers and vLLM load."""

from __future__ import annotations

import shutil
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Any

from async_opd.files.safe_open import regular_file, remove_tree
from async_opd.models.own_files import foreign, own_file, texts
from trainer.student.adapters import split_export, write_adapter

if TYPE_CHECKING:
    import torch

ADAPTER_FOLDER = "adapter"
NOT_COPIED = ("config.json", "*.index.json")
"""Files that ``save_pretrained`` writes itself. All other files but weights are copied: tokenizer,
generation config, model code."""


def save_model(
    model: Any, source: str, directory: str, weights: dict[str, torch.Tensor] | None = None
) -> None:
    """Writes weights and config, and copies the source's other files; complete or not at all.

        write <name>.part ──► rename <name> to <name>.old ──► rename ──► remove <name>.old

    An existing directory is replaced, and a complete model is on the disk at every moment; after an
    error it is the one before. Weights have the model's precision (float32 masters); ``weights``
    are the full ones of a sharded model or one with adapters (``adapters.export_state``). Adapters
    are merged, and beside that in a PEFT directory of their own in ``ADAPTER_FOLDER``.
    """
    target = Path(directory)
    part = target.with_name(target.name + ".part")
    old = target.with_name(target.name + ".old")
    remove_tree(part)
    try:
        plain, adapters = (weights, {}) if weights is None else split_export(weights)
        model.save_pretrained(part, state_dict=plain)
        if adapters:
            write_adapter(model, source, adapters, part / ADAPTER_FOLDER)
        _copy_rest(Path(source), part)
        if target.exists():
            remove_tree(old)
            target.rename(old)
        try:
            part.rename(target)
        except OSError:
            if old.exists():
                old.rename(target)
            raise
    finally:
        remove_tree(part)
    remove_tree(old)


def _copy_rest(source: Path, part: Path) -> None:
    """Copies the source's files but weights and config; of its folders only the templates.

    A link to a file outside of the source is not copied, with a warning.
    """
    for file in texts(source):
        real = own_file(file, source)
        if real is not None and not any(file.match(pattern) for pattern in NOT_COPIED):
            target = part / file.relative_to(source)
            target.parent.mkdir(exist_ok=True)
            with open(real, "rb", opener=regular_file) as read, target.open("wb") as written:
                shutil.copyfileobj(read, written)
    left_out = foreign(source)
    if left_out:
        names = ", ".join(repr(str(file.relative_to(source))) for file in left_out)
        warnings.warn(f"not copied from {source}, links out of it: {names}", stacklevel=2)
