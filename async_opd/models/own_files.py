"""Which files of a model directory are its own: those that no link takes from somewhere else.

A downloaded directory may hold a link to any file that its user can read, and what is read through
it would become part of the trained model, which people publish. The files of the hub's cache are
links too, to ``blobs`` of the same repository, and count as the model's own.
"""

from __future__ import annotations

import os.path
from collections.abc import Iterator
from pathlib import Path

WEIGHTS = (
    "*.safetensors",
    "*.bin",
    "*.pt",
    "*.pth",
    "*.ckpt",
    "*.gguf",
    "*.h5",
    "*.msgpack",
    "*.onnx",
)
"""Of these nothing but tensors gets into another file: they may lie elsewhere."""
HIDDEN = ".*"
TEMPLATES = "additional_chat_templates"


def own_file(file: Path, model: Path) -> Path | None:
    """The real path of a regular file that is the model's own; None for anything else."""
    real = Path(os.path.realpath(file))
    return real if real.is_file() and _inside(real, model) else None


def texts(model: Path) -> Iterator[Path]:
    """Everything of a model but weights and hidden files, and of its folders the templates."""
    for entry in _entries(model):
        if entry.is_file():
            yield entry
    if foreign_templates(model) is None and (model / TEMPLATES).is_dir():
        yield from (entry for entry in _entries(model / TEMPLATES) if entry.is_file())


def foreign_templates(model: Path) -> Path | None:
    """The folder of templates, if it is a link out of the model."""
    folder = model / TEMPLATES
    inside = _inside(Path(os.path.realpath(folder)), model)
    return None if inside or not folder.is_dir() else folder


def foreign(model: Path) -> list[Path]:
    """Files, and perhaps the folder of templates, that lie elsewhere than they seem to."""
    folder = foreign_templates(model)
    found = [file for file in texts(model) if own_file(file, model) is None]
    return [*found, *([] if folder is None else [folder])]


def _entries(folder: Path) -> list[Path]:
    left_out = (*WEIGHTS, HIDDEN)
    return [one for one in sorted(folder.iterdir()) if not any(map(one.match, left_out))]


def _inside(real: Path, model: Path) -> bool:
    """Whether a real path is below the model, no part of it hidden, or below its blobs."""
    home = Path(os.path.realpath(model))
    if real.is_relative_to(home):
        return not any(part.startswith(".") for part in real.relative_to(home).parts)
    return any(real.is_relative_to(blobs) for blobs in _blobs(home))


def _blobs(home: Path) -> Iterator[Path]:
    """``models--<owner>--<name>/snapshots/<commit>`` links to ``models--<owner>--<name>/blobs``."""
    for folder in (home, *home.parents):
        repository = folder.parent.parent
        if folder.parent.name == "snapshots" and repository.name.startswith("models--"):
            yield repository / "blobs"
