"""Which files of a data set of the Hugging Face hub have a split's rows, by its card or by names.

The cache keeps the list of all files of a commit: only by it a part is known from the whole.
"""

from __future__ import annotations

import contextlib
import json
import re
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from async_opd.config.paths import SPLITS
from async_opd.files.foreign import ForeignPath, foreign
from async_opd.files.safe_open import write_atomically

PART = re.compile(r"-\d{5}-of-(\d{5})")
"""In names of files: how many of them a split has."""
FRONT = re.compile(r"\s*---[ \t]*\n(.*?)^---[ \t]*$", re.DOTALL | re.MULTILINE)
"""The YAML at the begin of a card."""
MAX_CARD_CHARACTERS = 1 << 20
MAX_PATTERNS = 1000


def card_configs(card: ForeignPath) -> list[Any]:
    """``configs`` of a data set's card, if it has any. OSError, ValueError."""
    from async_opd.config.yaml_text import YamlError, load_yaml  # not before a card is read

    front = FRONT.match(card.read().decode("utf-8-sig").replace("\r\n", "\n"))
    if front is None:
        return []
    if len(front[1]) > MAX_CARD_CHARACTERS:
        raise ValueError(f"its YAML has more than {MAX_CARD_CHARACTERS:,} characters")
    try:
        tree = load_yaml(front[1])
    except YamlError as error:
        raise ValueError(str(error)) from error
    found = tree.get("configs") if isinstance(tree, dict) else None
    return found if isinstance(found, list) else []


def patterns_of(configs: list[Any], config: str | None, split: str) -> list[str] | None:
    """The patterns of files that a card has for a split; None where it has none. ValueError."""
    for one in configs:
        if not isinstance(one, dict):
            raise ValueError(f"configs has {type(one).__name__} in the place of a section")
        wanted = config or ("default" if len(configs) > 1 else one.get("config_name"))
        default = config is None and one.get("default") is True
        files = one.get("data_files")
        if files is None or not (default or one.get("config_name") == wanted):
            continue
        found: list[str] = []
        for entry in files if isinstance(files, list) else [files]:
            of, path = (entry.get("split"), entry.get("path")) if isinstance(entry, dict) else (
                "train", entry,
            )  # fmt: skip
            if of != split:
                continue
            for pattern in path if isinstance(path, list) else [path]:
                if not isinstance(pattern, str):
                    fault = "data_files has a path that is neither a text nor a list of texts"
                    raise ValueError(fault)
                found.append(pattern)
        if len(found) > MAX_PATTERNS:
            raise ValueError(f"data_files has more than {MAX_PATTERNS} paths for a split")
        return found
    return None


def files_by_name(names: list[str], config: str | None, split: str) -> list[str]:
    """The files whose folders name the configuration, and whose paths name the split.

    Files that name no split at all are those of ``train``.
    """
    if config is not None:
        names = [name for name in names if config in name.split("/")[:-1]]
    elif default := [name for name in names if name.startswith("default/")]:
        names = default
    named = [name for name in names if names_split(name, split)]
    if named or split != "train" or any(names_split(name, one) for name in names for one in SPLITS):
        return named
    return names


def names_split(name: str, split: str) -> bool:
    """Whether a folder's or the file's name has the split's as a word."""
    return re.search(rf"(^|[/._-]){re.escape(split)}([/._-])", name) is not None


def all_numbered(files: Sequence[str]) -> bool:
    """Whether the names of the files say how many there are, and all of them are there."""
    parts = Counter(PART.sub("-of-", name) for name in files)
    return all(
        PART.search(name) and parts[PART.sub("-of-", name)] == int(PART.findall(name)[0])
        for name in files
    )


def _list_of(snapshot: Path) -> Path:
    """Where the cache keeps the list of the files of a snapshot's commit."""
    return snapshot.parents[1] / "async_opd_files" / f"{snapshot.name}.json"


def keep_list(snapshot: Path, names: Sequence[str]) -> None:
    """Keeps the list of the files of a snapshot's commit in the cache, if that may be written."""
    # a cache that others fill may be read-only: then only numbered names show a whole split
    with contextlib.suppress(OSError):
        _list_of(snapshot).parent.mkdir(exist_ok=True)
        write_atomically(_list_of(snapshot), json.dumps(list(names)), durable=False)


def listed(snapshot: Path) -> list[str] | None:
    """The names of all files of a commit; None if the cache has no list of them."""
    try:
        found = json.loads(foreign(_list_of(snapshot)).read())
    except (OSError, ValueError):
        return None
    return found if isinstance(found, list) else None
