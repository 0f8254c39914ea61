"""The trained student as a Hugging Face directory that transformers and vLLM load."""

from __future__ import annotations

import shutil
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Any

from async_opd.files.safe_open import regular_file, remove_tree
from async_opd.models.own_files import foreign, own_file, texts

if TYPE_CHECKING:
    import torch

NOT_COPIED = ("config.json", "*.index.json")
"""Beside weights: the model writes its own. All else is the tokenizer's, the generation's or the
model code's."""


def save_model(
    model: Any, source: str, directory: str, weights: dict[str, torch.Tensor] | None = None
) -> None:
    """Writes weights, config and everything else of the source's; complete or not at all.

        write <name>.part ──► move what is there to <name>.old ──► rename ──► remove <name>.old

    At every moment there is a complete model on the disk; an error leaves the one that was there.
    A directory that is already there is replaced. Weights are written in the model's own precision
    (float32 masters): those of ``weights``, if the model has only a part of them.
    """
    target = Path(directory)
    part = target.with_name(target.name + ".part")
    old = target.with_name(target.name + ".old")
    remove_tree(part)
    try:
        model.save_pretrained(part, state_dict=weights)
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
    """All files of the source directory but weights and config; of its folders the templates.

    Files are the source's own: what a link takes from elsewhere is left out, with a warning.
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
