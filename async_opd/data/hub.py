"""Prompts of data sets of the Hugging Face hub, and of folders with the files of such a data set.

    hf:ID:CONFIG:SPLIT ──a run's start──► a commit, and the files with the split's rows
        rows ◄── the hub's cache ◄── all files before the run, or each when its turn comes (stream)

``check`` downloads nothing: it reads what is in the cache. A run's config has the commit and the
files' names, so that a resume reads the same rows. The cache keeps the list of all files of a
commit: only by it a part is known from the whole.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import re
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Self

from pydantic import Field, PrivateAttr

from async_opd.config.paths import SPLITS
from async_opd.config.sections.data import PromptSource
from async_opd.config.sections.section import Name
from async_opd.core.errors import ConfigError, Problem, SourceError
from async_opd.core.row import Row
from async_opd.data.fields import RowSource
from async_opd.data.files import file_rows, rows_and_numbers
from async_opd.files.foreign import ForeignPath, foreign
from async_opd.files.safe_open import write_atomically

if TYPE_CHECKING:
    from async_opd.config.run_config import RunConfig
    from async_opd.config.sections.data import DataConfig

SUFFIXES = (".parquet", ".jsonl")
CONVERTED = "refs/convert/parquet"
"""The hub's own branch with most data sets as parquet: ``config/split/0000.parquet``."""
CARD = "README.md"


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


class HubSource(RowSource):
    """Prompts from a data set of the Hugging Face hub: ``hf:ID[:CONFIG][:SPLIT]``."""

    kind: Literal["hub"]
    id: str = Field(min_length=1)
    """The data set's id, or a folder with its files."""
    config: Name | None = Field(default=None, min_length=1)
    """Its configuration (subset); by default its only or its default one."""
    split: Name = Field(default="train", min_length=1)
    """The split with the rows."""
    revision: str | None = Field(default=None, pattern=r"^[\w./-]+$", max_length=200)
    """Commit, tag or branch; by default the newest. A run notes the commit that it found."""
    files: list[str] | None = Field(default=None, min_length=1)
    """The files with the rows (``*.parquet``, ``*.jsonl``), in order; by default those that the
    data set's card or their names say."""
    _access: Literal["none", "cache", "hub"] = PrivateAttr("none")

    @property
    def label(self) -> str:
        """The id with configuration and split."""
        return ":".join(filter(None, (self.id, self.config, self.split)))

    @property
    def absent(self) -> bool:
        """Whether no file of it may be read: it is not in the cache, and nothing is downloaded."""
        return self._access == "none" and not self._is_folder

    def rows(self, index: int, data: DataConfig, start: int = 0) -> Iterator[Row | SourceError]:
        """See PromptSource.rows; numbers go on from one file to the next."""
        before = 0
        for name in self._named():
            try:
                path = self._path(name)
                rows, numbers = _size(path)
            except SourceError:
                raise
            except Exception as error:  # broken files find their way deep into pyarrow
                raise SourceError(self.label, f"{name} cannot be read: {error}") from error
            if start < rows:
                yield from file_rows(self, path, index, data, start, before)
            start, before = max(start - rows, 0), before + numbers

    def fetched(self) -> Self:
        """With its commit and files, from the hub; all files are downloaded, unless streamed.

        SourceError if that fails. Without a network (``HF_HUB_OFFLINE``) the cache has to do.
        """
        if self._is_folder:
            return self
        from huggingface_hub import HfApi, constants

        if constants.HF_HUB_OFFLINE:
            found = self.cached()
            if found.absent:
                raise SourceError(
                    self.label,
                    "is not in the local cache as a whole, as far as is known there, and "
                    "HF_HUB_OFFLINE is set: name the split's files by `files:` if they are",
                )
            return found
        made = self
        try:
            for revision in (self.revision, CONVERTED):
                info = HfApi().dataset_info(self.id, revision=revision)
                names = [one.rfilename for one in info.siblings or ()]
                made = self._with(info.sha, "hub")
                card = made._path(CARD) if CARD in names else None
                files = self.files or self._chosen(names, card)
                if files or self.revision is not None:
                    break
        except SourceError:
            raise
        except Exception as error:  # the hub's client raises many kinds
            raise SourceError(self.label, f"cannot be had from the hub: {error}") from error
        return made._checked(files, names)._downloaded(revision, names)

    def cached(self) -> Self:
        """With the commit and files that the local cache has; ``absent`` if it lacks any."""
        from huggingface_hub import snapshot_download

        for revision in () if self._is_folder else (self.revision, CONVERTED):
            try:
                folder = snapshot_download(
                    self.id, repo_type="dataset", revision=revision, local_files_only=True
                )
            except Exception:
                continue
            names = _names(Path(folder))
            commits = listed(Path(folder))
            card = _below(folder, CARD) if CARD in names else None
            files = self.files or self._chosen(commits or names, card)
            # without the commit's list, the names alone must say that no file is missing
            whole = bool(self.files or commits) or all_numbered(files)
            if files and whole and set(files) <= set(names):
                return self._with(os.path.basename(folder), "cache")._checked(files, names)
        return self

    def _with(self, commit: str | None, access: Literal["cache", "hub"]) -> Self:
        made = self.model_copy(update={"revision": commit})
        made._access = access
        return made

    def _checked(self, files: Sequence[str], names: Sequence[str]) -> Self:
        """With these files, all of which are among the data set's. SourceError."""
        missing = [name for name in files if name not in names]
        if missing or not files:
            message = f"has no {missing[0]}" if missing else self._nothing(names)
            raise SourceError(self.label, message)
        made = self.model_copy(update={"files": list(files)})
        made._access = self._access
        return made

    def _downloaded(self, branch: str | None, names: Sequence[str]) -> Self:
        """Downloads all files, or the first of a streamed data set.

        Keeps the list of the commit's files in the cache: ``cached`` knows a whole split by it.
        """
        named = self.files or []
        # by the branch's name: the cache then knows its commit, which a run without network needs
        first = self.model_copy(update={"revision": branch})._path(named[0])
        keep_list(first.root, names)
        for name in named[:1] if self.stream else named:
            self._path(name)
        return self

    @property
    def _is_folder(self) -> bool:
        return os.path.isabs(self.id)

    def _named(self) -> Sequence[str]:
        """The files with rows."""
        if self.files is not None or not self._is_folder:
            return self.files or ()
        folder = Path(self.id)
        names = _names(folder)
        if not names:
            raise SourceError(self.label, "does not exist, or has no files")
        found = self._chosen(names, _below(self.id, CARD) if CARD in names else None)
        if not found:
            raise SourceError(self.label, self._nothing(names))
        return found

    def _path(self, name: str) -> ForeignPath:
        """Where a file is; it is downloaded if it may be. SourceError."""
        if self._is_folder:
            return _below(self.id, name)
        from huggingface_hub import hf_hub_download

        try:
            path = hf_hub_download(
                self.id,
                name,
                repo_type="dataset",
                revision=self.revision,
                local_files_only=self._access != "hub",
            )
            return _below(path.removesuffix(f"/{name}"), name)
        except Exception as error:  # the hub's client raises many kinds
            raise SourceError(self.label, f"{name} cannot be had: {error}") from error

    def _nothing(self, names: Sequence[str]) -> str:
        known = ", ".join(name for name in names if name.endswith(SUFFIXES)) or "none"
        return (
            f"has no files for this configuration and split; its parquet and jsonl: {known[:300]}"
        )

    def _chosen(self, names: Sequence[str], card: ForeignPath | None) -> list[str]:
        """The files of the configuration and split: those that the card names, else by names."""
        try:
            configs = [] if card is None else card_configs(card)
            patterns = patterns_of(configs, self.config, self.split)
        except (OSError, ValueError) as error:
            message = f"its {CARD} cannot be read ({error}): name its own files by `files:`"
            raise SourceError(self.label, message) from error
        rows = sorted(name for name in names if name.endswith(SUFFIXES))
        if patterns is not None:
            return [name for name in rows if any(fnmatchcase(name, one) for one in patterns)]
        found = files_by_name(rows, self.config, self.split)
        if len({one.rpartition("/")[0] for one in found if names_split(one, self.split)}) > 1:
            some = ", ".join(found)[:300]
            message = f"its split's files are in several folders: name its own by `files:` ({some})"
            raise SourceError(self.label, message)
        return found


def _below(folder: str, name: str) -> ForeignPath:
    return ForeignPath(Path(folder), own_links=True) / name


def _names(folder: Path) -> list[str]:
    return [one.within for one in ForeignPath(folder).walk() if not one.parts[0].startswith(".")]


@functools.lru_cache(maxsize=4096)
def _size(path: ForeignPath) -> tuple[int, int]:
    """Rows, and numbers of rows, of a file of a commit: it never changes."""
    return rows_and_numbers(path)


def files_sized() -> int:
    """Files whose size this process has read: it grows while those before a resume are fetched."""
    return _size.cache_info().misses


def fetched_data(config: RunConfig, where: str) -> RunConfig:
    """The config with the commit and files of all data of the hub, which is downloaded.

    ConfigError with every data set that cannot be had.
    """
    problems: list[Problem] = []

    def fetched(key: str, source: HubSource) -> HubSource:
        try:
            return source.fetched()
        except SourceError as error:
            problems.append(
                Problem(where, key, str(error), "check the id, configuration and split")
            )
            return source

    made = _replaced(config, fetched)
    if problems:
        raise ConfigError(problems)
    return made


def with_cached_data(
    config: RunConfig, where: str, notes: list[str]
) -> tuple[RunConfig, list[Problem]]:
    """The config with the files of data of the hub that are in the local cache. No download.

    Every data set that is not there, or not as a whole, adds a note. The problems are those of data
    sets whose files are there and do not say which are the split's; these stay absent.
    """
    problems: list[Problem] = []

    def cached(key: str, source: HubSource) -> HubSource:
        try:
            found = source if source._access == "hub" else source.cached()
        except SourceError as error:
            if source.absent:  # a folder is read, and found at fault, with all other files
                remedy = "name the split's files by `files:`"
                problems.append(Problem(where, key, str(error), remedy))
            return source
        if found.absent:
            notes.append(
                f"{key}: {source.label} is not in the local cache: its rows are checked after the "
                "download, when a run starts"
            )
        return found

    return _replaced(config, cached), problems


def _replaced(config: RunConfig, change: Callable[[str, HubSource], HubSource]) -> RunConfig:
    """The config with each source of the hub replaced; ``change`` gets its key too."""

    def changed(key: str, sources: Sequence[PromptSource]) -> list[PromptSource]:
        return [
            change(f"{key}[{index}]", source) if isinstance(source, HubSource) else source
            for index, source in enumerate(sources)
        ]

    parts = {
        part: changed(f"data.{part}", getattr(config.data, part)) for part in ("train", "eval")
    }
    updates: dict[str, Any] = {"data": config.data.model_copy(update=parts)}
    if config.cold_start is not None:
        update = {"data": changed("cold_start.data", config.cold_start.data)}
        updates["cold_start"] = config.cold_start.model_copy(update=update)
    return config.model_copy(update=updates)
