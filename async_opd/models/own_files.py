"""A model directory's own files, without files that are links to a place outside of it.

A downloaded directory may hold a link to any file that its user can read, whose contents would
become part of the trained model, which people publish. The files of the hub's cache are links to
``blobs`` of the same repository, and count as the model's own.
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
"""Weight files may be links: only their tensors are read."""
HIDDEN = ".*"
TEMPLATES = "additional_chat_templates"


def own_file(file: Path, model: Path) -> Path | None:
    """The real path of a regular file that is the model's own; None for any other."""
    real = Path(os.path.realpath(file))
    return real if real.is_file() and _inside(real, model) else None


def texts(model: Path) -> Iterator[Path]:
    """A model's files without weights and hidden ones, then those in its folder of templates."""
    for entry in _entries(model):
        if entry.is_file():
            yield entry
    if foreign_templates(model) is None and (model / TEMPLATES).is_dir():
        yield from (entry for entry in _entries(model / TEMPLATES) if entry.is_file())


def foreign_templates(model: Path) -> Path | None:
    """The folder of templates, if it is a link to a place outside of the model."""
    folder = model / TEMPLATES
    inside = _inside(Path(os.path.realpath(folder)), model)
    return None if inside or not folder.is_dir() else folder


def foreign(model: Path) -> list[Path]:
    """Files, and the folder of templates, that are links to a place outside of the model."""
    folder = foreign_templates(model)
    linked = [file for file in texts(model) if own_file(file, model) is None]
    return [*linked, *([] if folder is None else [folder])]


def _entries(folder: Path) -> list[Path]:
    excluded = (*WEIGHTS, HIDDEN)
    return [one for one in sorted(folder.iterdir()) if not any(map(one.match, excluded))]


def _inside(real: Path, model: Path) -> bool:
    """Whether a real path is below the model without a hidden part, or below its blobs."""
    home = Path(os.path.realpath(model))
    if real.is_relative_to(home):
        return not any(part.startswith(".") for part in real.relative_to(home).parts)
    return any(real.is_relative_to(blobs) for blobs in _blobs(home))


def _blobs(home: Path) -> Iterator[Path]:
    """Folders that ``models--<owner>--<name>/snapshots/<commit>`` may link to: ``…/blobs``."""
    for folder in (home, *home.parents):
        repository = folder.parent.parent
        if folder.parent.name == "snapshots" and repository.name.startswith("models--"):
            yield repository / "blobs"
