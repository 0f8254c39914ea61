"""YAML for configs: ``1e-5`` is a number, duplicate keys are refused, errors have a line.

Some plain words that YAML 1.1 converts stay strings here: ``12:30:00`` is not a number of base 60,
``2026-01-01`` no date and ``010`` no eight.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import yaml

from async_opd.core.nesting import MAX_DEPTH

FLOAT_WITHOUT_DOT = re.compile(r"^[-+]?(\d+(\.\d*)?|\.\d+)[eE][-+]?\d+$")
MERGE = "tag:yaml.org,2002:merge"
MAX_VALUES = 100_000
"""Bound of a document's values with every alias expanded: a few lines of nested aliases can expand
to billions. A text counts once more for every ``CHARACTERS`` of it."""
CHARACTERS = 100
SHOWN = 80
"""Characters of a value that an error shows."""
CONSTRUCTOR_ERRORS = (ValueError, TypeError, AttributeError, LookupError, OverflowError)
"""Errors of PyYAML's own constructors for values that do not fit an explicit tag."""


class YamlError(Exception):
    """No valid YAML. ``faults`` are (1-based line, dotted key or '', fault)."""

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
                None, None, f"{repr(node.value)[:SHOWN]} is not a valid {kind}", node.start_mark
            ) from error


class _Dumper(yaml.SafeDumper):
    def ignore_aliases(self, data: Any) -> bool:
        return True


def _number(loader: _Loader, node: yaml.ScalarNode) -> Any:
    """A number; base 60 is refused, whose conversion takes time quadratic in the length."""
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
"""Plain words that are numbers: their first letters and their form; ``_NUMBERS`` has the rest."""
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


def dump_yaml(value: Any, *, flow: bool | None = False) -> str:
    """A document that ``load_yaml`` reads back to an equal value (tuples as lists).

    It is ASCII: PyYAML would write some Unicode line breaks unescaped, and fold them on reading.
    ``flow``: sections and lists are ``{a: 1, b: [2]}``, in lines of about 90 characters; None: the
    innermost ones are.
    """
    text: str = yaml.dump(
        value,
        Dumper=_Dumper,
        sort_keys=False,
        default_flow_style=flow,
        width=80 if flow is False else 90,
    )
    return text


def _excess(root: yaml.Node) -> Iterator[tuple[int, str, str]]:
    """Faults of a document without cycles that is too large or too deep with aliases expanded."""
    known: dict[int, tuple[int, int]] = {}

    def measure(node: yaml.Node) -> tuple[int, int]:
        """Number of values in the node, itself included, and their depth."""
        if isinstance(node, yaml.ScalarNode):
            return 1 + len(node.value) // CHARACTERS, 1
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
        yield 1, "", f"too large: more than {MAX_VALUES:,} values with its aliases expanded"


def _faults(
    node: yaml.Node, key: str, above: tuple[yaml.Node, ...], seen: set[int]
) -> Iterator[tuple[int, str, str]]:
    """Faults of duplicate keys, and of values that contain themselves."""
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
