"""Paths in a config: ``~`` and ``${VAR}`` in them, and the folder that they are relative to."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from async_opd.config.secrets import HIDDEN, looks_secret, names_secret

HUB = "hf:"
"""Begins a source of prompts that is a data set of the hub."""
PYTHON_FILE = re.compile(r"\.py(:\w+)?$")
"""Ends a grader, or an environment, that is in a file."""
SPLITS = ("train", "test", "validation", "valid", "val", "dev")
"""How names of splits begin."""
URL = re.compile(r"[a-z][a-z0-9+.-]*://.")
"""Begins a path in a store that is not a directory of this machine: ``s3://bucket/file``."""
VARIABLE = re.compile(r"\$\{(\w+)\}")
SECRET_REMEDY = (
    "remove it: what reads the path takes its secret from the environment by itself (HF_TOKEN, "
    "AWS_SECRET_ACCESS_KEY), or name a variable with a path"
)
Add = Callable[[str, str, str], None]
"""Adds a problem: key, message, remedy."""


def resolve_paths(tree: dict[Any, Any], folder: Path, add: Add, recorded: bool = False) -> None:
    """Makes paths of models, data and user code absolute, relative to ``folder``, the config's.

    ``run_dir`` stays relative to the working directory. Variables that are not set are added, and
    those that hold a secret, which the run directory's config.yaml would show. That one, which is
    ``recorded``, has none left: text that looks like one is not a reference.
    """
    for section, name, key in _paths(tree):
        text = section[name]
        for variable in () if recorded else VARIABLE.findall(text):
            value = os.environ.get(variable)
            if names_secret(variable) or looks_secret(value or ""):
                message = f"{text!r} names {variable}, a secret, which paths in files would show"
                add(key, message, SECRET_REMEDY)
                text = text.replace(f"${{{variable}}}", HIDDEN)
            elif value is None:
                message = f"{text!r} needs the environment variable {variable}, which is not set"
                add(key, message, f"export {variable}, or write the path itself")
        if not recorded:
            text = VARIABLE.sub(lambda found: os.environ.get(found[1], found[0]), text)
        if key == "run_dir" and is_url(text):
            message = f"found {text}: a run writes to a directory of this machine"
            add(key, message, "leave it local, and set checkpoint.mirror to the URL")
        if key == "run_dir":
            section[name] = os.path.expanduser(text)
        elif key == "checkpoint.mirror":
            section[name] = text
        elif name in ("model", "id"):
            section[name] = _model(os.path.expanduser(text), folder)
        elif is_url(text):
            section[name] = text
        elif text.startswith(HUB):
            named = os.path.expanduser(text.removeprefix(HUB))
            section[name] = HUB + _model(named, folder)
        else:
            section[name] = str(folder / os.path.expanduser(text))


def is_url(text: str) -> bool:
    """Whether the text names a file or a folder by a URL."""
    return URL.match(text) is not None


def _model(model: str, folder: Path) -> str:
    """A model's directory, or its hub id as it is."""
    # A model whose first folder exists is a path, even if the rest of it is missing: it
    # may be mistyped, and would be downloaded from the hub as another model.
    first = model.partition("/")[0]
    if model.startswith(("./", "../")) or (first and _exists(folder / first)):
        return str(folder / model)
    return model


def _paths(tree: dict[Any, Any]) -> Iterator[tuple[Any, Any, str]]:
    """The places of paths: a section or list, the name or index in it, and the dotted key."""
    teachers = tree.get("teachers")
    models = {"student": tree.get("student")} | {
        f"teachers.{name}": teacher
        for name, teacher in (teachers.items() if isinstance(teachers, dict) else ())
    }
    for key, section in models.items():
        yield from _text_at(section, "model", key)
        yield from _text_at(section, "chat_template_file", key)
    for key in ("data.train", "data.eval", "cold_start.data"):
        outer, _, name = key.partition(".")
        section = tree.get(outer)
        if isinstance(section, dict):
            yield from _sources(section, name, key)
    for outer, name in (("eval", "grader"), ("reward", "grader"), ("environment", "factory")):
        section = tree.get(outer)
        if isinstance(section, dict) and PYTHON_FILE.search(str(section.get(name))):
            yield from _text_at(section, name, outer)
    environment = tree.get("environment")
    tools = environment.get("tools") if isinstance(environment, dict) else None
    for index, tool in enumerate(tools if isinstance(tools, list) else ()):
        if isinstance(tool, str) and PYTHON_FILE.search(tool):
            yield tools, index, f"environment.tools[{index}]"
    yield from _text_at(tree.get("checkpoint"), "mirror", "checkpoint")
    yield from _text_at(tree, "run_dir", "")


def _sources(section: dict[Any, Any], name: str, key: str) -> Iterator[tuple[Any, Any, str]]:
    """The paths of one source, or of a list of them: bare strings, or ``path`` in sections."""
    value = section.get(name)
    if isinstance(value, str) and value:
        yield section, name, key
    entries = value if isinstance(value, list) else [value]
    for index, entry in enumerate(entries):
        if isinstance(entry, str) and entry and entries is value:
            yield value, index, f"{key}[{index}]"
        yield from _text_at(entry, "path", f"{key}[{index}]")
        yield from _text_at(entry, "id", f"{key}[{index}]")
        yield from _text_at(entry, "image_folder", f"{key}[{index}]")


def _text_at(section: Any, name: str, key: str) -> Iterator[tuple[Any, Any, str]]:
    if isinstance(section, dict) and isinstance(section.get(name), str) and section[name]:
        yield section, name, f"{key}.{name}".lstrip(".")


def _exists(path: Path) -> bool:
    try:
        return path.exists()
    except (OSError, ValueError):  # a name too long, or with a NUL: preflight reports it
        return False


def hub_source_of(text: str) -> dict[str, Any]:
    """The keys of ``ID[:CONFIG][:SPLIT]``; a single part that begins as splits do is a split."""
    name, *parts = text.split(":")
    if len(parts) == 1 and parts[0].startswith(SPLITS):
        parts = ["", parts[0]]
    keys = zip(("config", "split"), parts, strict=False)
    return {"kind": "hub", "id": name, **{key: part for key, part in keys if part}}
