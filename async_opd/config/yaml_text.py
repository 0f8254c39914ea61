"""YAML as configs need it: ``1e-5`` is a number, a key is there once, errors know their line.

Of what YAML 1.1 makes of plain words, ``12:30:00`` is no number of base 60 here, ``2026-01-01`` no
date and ``010`` no eight: they are strings, like any other word.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import yaml

from async_opd.core.nesting import MAX_DEPTH

FLOAT_WITHOUT_DOT = re.compile(r"^[-+]?(\d+\.?\d*|\.\d+)[eE][-+]?\d+$")
MERGE = "tag:yaml.org,2002:merge"
MAX_VALUES = 100_000
"""Values of a document with every alias written out: a few lines of aliases of aliases are
billions of them."""
SHOWN = 80
"""Letters of a value in an error."""
CONSTRUCTOR_ERRORS = (ValueError, TypeError, AttributeError, LookupError, OverflowError)
"""What PyYAML's own constructors raise for values that do not fit an explicit tag."""


class YamlError(Exception):
    """No valid YAML. ``faults`` are (1-based line, dotted key or '', what is wrong)."""

    def __init__(self, faults: list[tuple[int, str, str]]) -> None:
        super().__init__(faults)
        self.faults = faults

    def __str__(self) -> str:
        return "; ".join(message for _, _, message in self.faults)


class _Loader(yaml.SafeLoader):
    def construct_object(self, node: yaml.Node, deep: bool = False) -> Any:
        try:
            return super().construct_object(node, deep)
        except CONSTRUCTOR_ERRORS as error:
            kind = node.tag.rpartition(":")[2]
            raise yaml.constructor.ConstructorError(
                None, None, f"{repr(node.value)[:SHOWN]} is no {kind}", node.start_mark
            ) from error


class _Dumper(yaml.SafeDumper):
    def ignore_aliases(self, data: Any) -> bool:
        return True


def _number(loader: _Loader, node: yaml.ScalarNode) -> Any:
    """Without base 60, which takes time by the square of its length."""
    if ":" in node.value or len(node.value) > MAX_NUMBER_DIGITS:
        raise ValueError(node.value)
    if node.tag.endswith("int"):
        return loader.construct_yaml_int(node)
    return loader.construct_yaml_float(node)


WORDS = {
    "int": (
        "-+0123456789",
        re.compile(r"^(?:[-+]?(?:0|[1-9][0-9_]{0,99})|0x[0-9a-fA-F]{1,32}|0o[0-7]{1,32})$"),
    ),
    "float": (
        "-+.0123456789",
        re.compile(r"^[-+]?(?:[0-9][0-9_]{0,99}\.[0-9_]{0,99}|\.[0-9][0-9_]{0,99})$"),
    ),
}
"""Plain words that are numbers, by their first letter; infinities and NaN beside them."""
MAX_NUMBER_DIGITS = 102
_NUMBERS = re.compile(r"^(?:[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN))$")
_LEFT = (*(f"tag:yaml.org,2002:{kind}" for kind in ("null", "bool", "value")), MERGE)
_Loader.yaml_implicit_resolvers = {
    letter: [(tag, pattern) for tag, pattern in resolvers if tag in _LEFT]
    for letter, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
}
for _name, (_letters, _pattern) in WORDS.items():
    _Loader.add_implicit_resolver(f"tag:yaml.org,2002:{_name}", _pattern, list(_letters))
_Loader.add_implicit_resolver("tag:yaml.org,2002:float", _NUMBERS, list("-+."))
for _kind in ("int", "float"):
    _Loader.add_constructor(f"tag:yaml.org,2002:{_kind}", _number)
for _side in (_Loader, _Dumper):
    _side.add_implicit_resolver("tag:yaml.org,2002:float", FLOAT_WITHOUT_DOT, list("-+0123456789."))


def load_yaml(text: str) -> Any:
    """The value of one document. Raises YamlError, with all duplicate keys at once."""
    loader: _Loader | None = None
    try:
        loader = _Loader(text)
        node = loader.get_single_node()
        if node is None:
            return None
        faults = list(_faults(node, "", (), set()))
        if not faults:
            faults = list(_excess(node))
        if faults:
            raise YamlError(faults)
        return loader.construct_document(node)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        message = " ".join(part for part in (error.context, error.problem) if part)
        raise YamlError([(mark.line + 1 if mark else 1, "", message)]) from None
    except yaml.reader.ReaderError as error:
        line = text.count("\n", 0, error.position) + 1
        message = f"the character {chr(error.character)!r} is not allowed"
        raise YamlError([(line, "", message)]) from None
    except RecursionError:
        raise YamlError([(1, "", "nested too deeply")]) from None
    finally:
        if loader is not None:
            loader.dispose()


def dump_yaml(value: Any) -> str:
    """A document that ``load_yaml`` reads back to an equal value (tuples as lists).

    ASCII only: PyYAML would write some line breaks of Unicode as they are, and fold them.
    """
    text: str = yaml.dump(value, Dumper=_Dumper, sort_keys=False)
    return text


def _excess(root: yaml.Node) -> Iterator[tuple[int, str, str]]:
    """A document that is too large or too deep with its aliases written out; it has no cycles."""
    known: dict[int, tuple[int, int]] = {}

    def measure(node: yaml.Node) -> tuple[int, int]:
        """Values in the node, itself included, and how deep they go."""
        if isinstance(node, yaml.ScalarNode):
            return 1, 1
        if id(node) not in known:
            pairs = isinstance(node, yaml.MappingNode)
            inner = [one for pair in node.value for one in pair] if pairs else node.value
            sizes = [measure(one) for one in inner] or [(0, 0)]
            known[id(node)] = 1 + sum(size for size, _ in sizes), 1 + max(d for _, d in sizes)
        return known[id(node)]

    values, depth = measure(root)
    if depth > MAX_DEPTH:
        yield 1, "", f"nested too deeply: {depth} values inside of each other"
    if values > MAX_VALUES:
        yield 1, "", f"too large: more than {MAX_VALUES:,} values with its aliases written out"


def _faults(
    node: yaml.Node, key: str, above: tuple[yaml.Node, ...], seen: set[int]
) -> Iterator[tuple[int, str, str]]:
    """Keys that are there twice, and values that contain themselves."""
    if node in above:
        yield node.start_mark.line + 1, key, "the value contains itself"
        return
    if id(node) in seen or isinstance(node, yaml.ScalarNode):
        return
    seen.add(id(node))
    above = (*above, node)
    if isinstance(node, yaml.SequenceNode):
        for index, item in enumerate(node.value):
            yield from _faults(item, f"{key}.{index}".lstrip("."), above, seen)
        return
    lines: dict[str, int] = {}
    for name, value in node.value:
        inner = key
        if isinstance(name, yaml.ScalarNode):
            inner = f"{key}.{name.value}".lstrip(".")
            line = name.start_mark.line + 1
            if name.value in lines and name.tag != MERGE:
                first = lines[name.value]
                yield line, inner, f"the key is there twice, first on line {first}"
            lines.setdefault(name.value, line)
        yield from _faults(value, inner, above, seen)
