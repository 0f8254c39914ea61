"""A model directory's own files, without files that are links to a place outside of it.

A downloaded directory may hold a link to any file that its user can read, whose contents would
become part of the trained model, which people publish. The files of the hub's cache are links to
``blobs`` of the same repository, and count as the model's own.
"""

from __future__ import annotations

import errno
import os.path
from collections.abc import Iterator
from fnmatch import fnmatchcase
from pathlib import Path

from async_opd.files.foreign import ForeignPath

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
PARTS = (
    *("*.safetensors", "*.json", "*.jinja", "*.txt", "*.model", "*.tiktoken", "*.bpe", "*.spm"),
    *("*.vocab", "*.py", "*.md", "LICENSE*", "LICENCE*", "COPYING*"),
    *("NOTICE*", "Notice*", "tokenizer.model.*"),
)
"""Names of files that a model consists of."""
HIDDEN = ".*"
TEMPLATES = "additional_chat_templates"


def is_part(name: str) -> bool:
    """Whether a model may have a file of this name."""
    return any(fnmatchcase(name, pattern) for pattern in PARTS)


def own_file(file: Path, model: Path) -> ForeignPath | None:
    """A regular file that is the model's own; None for any other."""
    own = ForeignPath(model, file.relative_to(model).parts, own_links=True)
    return own if _leads_to(own) and own.is_file() else None


def weights_file(file: Path) -> Path:
    """A file of weights, which may be a link. OSError for a pipe: opening it might never end."""
    if not file.is_file():
        raise OSError(errno.EINVAL, "is not a regular file", str(file))
    return file


def texts(model: Path) -> Iterator[Path]:
    """A model's files without weights and hidden ones, then those in its folder of templates."""
    for entry in _entries(model):
        if entry.is_file():
            yield entry
    if (model / TEMPLATES).is_dir() and not (model / TEMPLATES).is_symlink():
        yield from (entry for entry in _entries(model / TEMPLATES) if entry.is_file())


def foreign(model: Path) -> list[Path]:
    """Files that are links to a place outside of the model, and every link to a folder."""
    linked = [file for file in texts(model) if own_file(file, model) is None]
    return [*linked, *linked_folders(model)]


def linked_folders(model: Path) -> list[Path]:
    """Links to folders, at any depth. Files that are read through them were not checked."""
    return [folder for folder in folders(model) if folder.is_symlink()]


def folders(model: Path) -> Iterator[Path]:
    """All folders below a model, hidden ones too; a link to one is there, but not entered."""
    left = [model]
    while left:
        for entry in sorted(left.pop().iterdir()):
            if os.path.isdir(entry):
                yield entry
                left += [] if entry.is_symlink() else [entry]


def _entries(folder: Path) -> list[Path]:
    excluded = (*WEIGHTS, HIDDEN)
    return [one for one in sorted(folder.iterdir()) if not any(map(one.match, excluded))]


def _leads_to(place: ForeignPath) -> bool:
    """Whether the links on the way to a place are the model's own, or there is none."""
    try:
        place.exists()
    except OSError:
        return False
    return True
