"""From a YAML file and ``key=value`` overrides to a RunConfig, or to all problems at once.

defaults  <  YAML  <  command line
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Hashable, Sequence
from pathlib import Path
from typing import Any, get_args

import yaml
from pydantic import BaseModel, ValidationError

from async_opd.core.config import RunConfig
from async_opd.core.errors import ConfigError, Problem

COMMAND_LINE = "command line"
K1_ALIASES = re.compile(r"^(supervised_)?(reverse_kl_)?(k1|kl)(_supervised|_loss)?$")


class _Loader(yaml.SafeLoader):
    """Safe YAML that reads ``1e-5`` as a number and refuses duplicate keys."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:
        seen: set[Any] = set()
        for key_node, _ in node.value:
            key = self.construct_object(key_node, deep=True)
            if key in seen:
                raise yaml.constructor.ConstructorError(
                    None, None, f"the key {key!r} is there twice", key_node.start_mark
                )
            seen.add(key)
        return super().construct_mapping(node, deep)


_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float",
    re.compile(r"^[-+]?(\d+\.?\d*|\.\d+)[eE][-+]?\d+$"),
    list("-+0123456789."),
)


def load_config(path: str | Path, overrides: Sequence[str] = ()) -> RunConfig:
    """Reads, overrides, validates. Raises ConfigError with every problem found."""
    file = Path(path)
    tree = _read(file)
    origin: dict[str, str] = {}
    problems: list[Problem] = []
    for override in overrides:
        problem = _override(tree, override, origin)
        if problem:
            problems.append(problem)
    problems += _supervised_k1(tree, str(file), origin)
    if isinstance(tree.get("loss"), dict):
        tree["loss"].setdefault("kind", "forward_kl")
    _resolve_paths(tree, file.resolve().parent)
    try:
        config = RunConfig.model_validate(tree)
    except ValidationError as error:
        known = {problem.key for problem in problems}
        found = (_problem(entry, tree, str(file), origin) for entry in error.errors())
        problems += [p for p in found if not any(k and p.key.startswith(k) for k in known)]
        raise ConfigError(problems) from None
    if problems:
        raise ConfigError(problems)
    return config


def dump_config(config: RunConfig) -> str:
    """YAML that loads to an equal config."""
    return yaml.safe_dump(
        config.model_dump(mode="json", by_alias=True), sort_keys=False, allow_unicode=True
    )


def _read(file: Path) -> dict[str, Any]:
    try:
        text = file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(
            [Problem(str(file), "", f"cannot be read: {error}", "check the path")]
        ) from None
    try:
        tree = yaml.load(text, _Loader)
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        message = " ".join(str(error).split())
        raise ConfigError([Problem(str(file), "", f"is no valid YAML: {message}")]) from None
    if not isinstance(tree, dict):
        raise ConfigError(
            [Problem(str(file), "", f"holds {type(tree).__name__}, expected keys and values")]
        )
    return tree


def _override(tree: dict[str, Any], override: str, origin: dict[str, str]) -> Problem | None:
    key, equals, text = override.partition("=")
    parts = key.strip().split(".")
    if not equals or not all(parts):
        return Problem(
            COMMAND_LINE, override, "is no override", "write key=value, as in train.lr=1e-4"
        )
    try:
        value = yaml.load(text, _Loader)
    except (yaml.YAMLError, ValueError, RecursionError):
        value = text
    node: Any = tree
    for part in parts[:-1]:
        if node.get(part) is None:
            node[part] = {}
        node = node[part]
        if not isinstance(node, dict):
            return Problem(COMMAND_LINE, key, f"{part} is {node!r}, which has no keys below it")
    node[parts[-1]] = value
    origin[".".join(parts)] = COMMAND_LINE
    return None


def _supervised_k1(tree: dict[str, Any], where: str, origin: dict[str, str]) -> list[Problem]:
    loss = tree.get("loss")
    if not isinstance(loss, dict):
        return []
    kind = str(loss.get("kind", ""))
    if not K1_ALIASES.match(kind.lower().replace("-", "_")):
        return []
    supervised = "supervised" in kind or "loss" in kind
    supervised |= str(loss.get("gradient", "policy_gradient")) != "policy_gradient"
    supervised |= any(loss.get(key) is False for key in ("policy_gradient", "use_policy_gradient"))
    if not supervised and kind == "k1":
        return []
    place = next((w for k, w in origin.items() if k.startswith("loss")), where)
    return [
        Problem(
            place,
            "loss",
            f"{loss!r}: a supervised k1 does not distil: the gradient of log q - log p is that of "
            "log q alone, in which the teacher does not appear",
            "write loss: {kind: k1, gradient: policy_gradient}, or use forward_kl",
        )
    ]


def _resolve_paths(tree: dict[str, Any], folder: Path) -> None:
    """Makes paths absolute that are relative to the config file."""
    models = [tree.get("student")]
    if isinstance(tree.get("teachers"), dict):
        models += tree["teachers"].values()
    for section in models:
        if isinstance(section, dict) and isinstance(section.get("model"), str):
            model = section["model"]
            if model.startswith(".") or (folder / model).exists():
                section["model"] = str(folder / model)
    data = tree.get("data")
    if not isinstance(data, dict):
        return
    for key in ("train", "eval"):
        entries = data.get(key)
        if isinstance(entries, str):
            data[key] = str(folder / entries)
        elif isinstance(entries, list):
            data[key] = [_resolve_entry(entry, folder) for entry in entries]


def _resolve_entry(entry: Any, folder: Path) -> Any:
    if isinstance(entry, str):
        return str(folder / entry)
    if isinstance(entry, dict) and isinstance(entry.get("path"), str):
        return {**entry, "path": str(folder / entry["path"])}
    return entry


def _problem(entry: Any, tree: dict[str, Any], where: str, origin: dict[str, str]) -> Problem:
    """One pydantic error in our words."""
    parts = _path(entry["loc"], tree)
    key = ".".join(parts)
    place = next((w for k, w in origin.items() if key.startswith(k)), where)
    message, remedy = str(entry["msg"]), ""
    kind = entry["type"]
    if kind == "extra_forbidden":
        known = _known_keys(parts[:-1])
        near = difflib.get_close_matches(parts[-1], known, n=1, cutoff=0.5)
        message = f"unknown key (value {entry['input']!r})"
        remedy = (
            f"did you mean {'.'.join([*parts[:-1], near[0]])}?"
            if near
            else (f"known keys here: {', '.join(known)}" if known else "remove it")
        )
    elif kind == "missing":
        message, remedy = "is missing", f"add {key}"
    elif kind == "union_tag_invalid":
        expected = entry["ctx"]["expected_tags"]
        found = entry["input"].get("kind") if isinstance(entry["input"], dict) else entry["input"]
        key, message = f"{key}.kind", f"found {found!r}, expected one of {expected}"
        near = difflib.get_close_matches(str(found), re.findall(r"'(\w+)'", expected), n=1)
        remedy = f"did you mean {near[0]}?" if near else ""
    elif key == "":
        key, message = "config", message.removeprefix("Value error, ")
    else:
        message = f"found {entry['input']!r}: {message.removeprefix('Value error, ')}"
        default = _default(parts)
        remedy = f"the default is {default!r}" if default is not None else ""
    return Problem(place, key, message, remedy)


def _path(loc: tuple[int | str, ...], tree: Any) -> list[str]:
    """The location without the tags that pydantic adds for unions."""
    parts: list[str] = []
    node: Any = tree
    for index, item in enumerate(loc):
        tag = isinstance(node, dict) and item == node.get("kind") and item not in node
        if tag or (item == "file" and isinstance(node, str | dict) and index < len(loc) - 1):
            continue
        parts.append("async" if item == "async_" else str(item))
        try:
            node = node[item]
        except (KeyError, IndexError, TypeError):
            node = None
    return parts


def _sections(annotation: Any) -> list[type[BaseModel]]:
    """The sections an annotation can hold."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [annotation]
    return [section for inner in get_args(annotation) for section in _sections(inner)]


def _walk(parts: Sequence[str]) -> list[type[BaseModel]]:
    sections: list[type[BaseModel]] = [RunConfig]
    for part in parts:
        inner: list[type[BaseModel]] = []
        for section in sections:
            for name, info in section.model_fields.items():
                if part in (name, info.alias):
                    inner += _sections(info.annotation)
        sections = inner or sections  # a dict's key or a list's index
    return sections


def _known_keys(parts: Sequence[str]) -> list[str]:
    keys = [
        info.alias or name
        for section in _walk(parts)
        for name, info in section.model_fields.items()
    ]
    return list(dict.fromkeys(keys))


def _default(parts: Sequence[str]) -> Any:
    for section in _walk(parts[:-1]):
        for name, info in section.model_fields.items():
            if parts[-1] in (name, info.alias) and not info.is_required():
                return info.default
    return None
