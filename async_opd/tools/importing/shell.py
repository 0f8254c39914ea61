"""Commands of a shell script, with its variables in place: parsed, never executed.

    text ──read_shell──► words of each command ──overrides, flags──► keys and values

Read are assignments, arrays, ``${NAME:-default}``, ``$((…))`` and commands at the top level.
Text inside of ``if``, loops, functions and ``$(…)`` is not read, and is reported. A value that
needs it, an argument of the script, or a variable that a condition sets is an ``Expression``.
"""

from __future__ import annotations

import ast
import operator
import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

from async_opd.config.yaml_text import YamlError, load_yaml
from async_opd.tools.importing.budget import Budget
from async_opd.tools.importing.draft import Expression, flat

ASSIGNMENT = re.compile(r"^(?:export\s+|local\s+|readonly\s+)?([A-Za-z_]\w*)(\+?)=(.*)$", re.DOTALL)
VARIABLE = re.compile(r"\$(?:(\w+)|\{(\w+)(?::?([-=])((?:[^{}]|\{[^{}]*\})*))?\})")
UNKNOWN = re.compile(r"\$\(|`|\$\{\d+\}|\$[@*]")
"""A part of a value that only running the script would give."""
SET = re.compile(r"(?:^|[;\s])(?:export\s+|local\s+)?([A-Za-z_]\w*)\+?=(?!\()")
"""A variable that a line sets, which is not an array."""
ARRAY = re.compile(r"^\$\{(\w+)\[@\]\}$")
PIECE = re.compile(
    r"""(?P<space>[ \t\r\n]+)|(?P<plain>[^ \t\r\n"'\\]+)|\\(?P<escaped>.)"""
    r"""|'(?P<single>[^']*)'|"(?P<double>[^"\\]*(?:\\.[^"\\]*)*)\"""",
    re.DOTALL,
)
"""A part of a word, or what is between two words."""
MAX_SUM = 10_000
"""Characters of a ``$((…))`` that are read."""
OVERRIDE = re.compile(r"^\+{0,2}([A-Za-z_][\w-]*(?:\.[\w-]+)+)=(.*)$", re.DOTALL)
"""Hydra's ``a.b=value``, ``+a.b=value`` or ``++a.b=value``."""
REMOVED = re.compile(r"^~([A-Za-z_][\w-]*(?:\.[\w-]+)+)")
"""A key that an override takes away."""
KEY = re.compile(r"(?<=[{,])(\s*[\w.-]+):(?=\S)")
"""A key of Hydra's ``{a:1}``, which YAML would read as one text."""
ENDS_FLAGS = re.compile(r"^(?:\d*[<>].*|&&?|\|\|?|;)$")
"""Redirections and what joins two commands."""
FLAG = re.compile(r"^--([A-Za-z][\w-]*)(?:=(.*))?$", re.DOTALL)
OPENS = ("if", "for", "while", "until", "case")
CLOSES = ("fi", "done", "esac")
OPERATIONS: dict[type[ast.AST], Callable[[int, int], int]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.floordiv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
}


@dataclass
class Script:
    """Words of each command, and the first lines of what was not read."""

    commands: list[list[str]] = field(default_factory=list)
    skipped: list[str] = field(default_factory=list)


def read_shell(text: str, budget: Budget) -> Script:
    """The commands of a script, with variables and arrays expanded as far as the script sets them.

    ``$NAME`` of the environment stays ``${NAME}``. SyntaxError if the words are more than the
    budget.
    """
    script, variables = Script(), _Variables(budget)
    depth = 0
    for line in _logical_lines(text):
        first = line.split(None, 1)[0].rstrip(";")
        opens = first in OPENS or bool(re.match(r"^(function\s+)?\w+\s*\(\)", line))
        if opens and depth == 0:
            script.skipped.append(line.splitlines()[0])
        if opens or depth:
            depth += _change(line, opens)
            variables.unsure(line)
            continue
        _read_line(line, script, variables)
    return script


def _change(line: str, opens: bool) -> int:
    words = re.findall(r"[\w{}]+", line)
    closed = sum(word in CLOSES for word in words) + (words[-1:] == ["}"] and not opens)
    return int(opens) - closed


@dataclass
class _Variables:
    """The variables that the script has set so far."""

    budget: Budget
    names: dict[str, str] = field(default_factory=dict)
    arrays: dict[str, list[str]] = field(default_factory=dict)

    def words(self, text: str) -> list[str]:
        """The words of a line; none if a quote is not closed."""
        try:
            raw = split(_with_sums(text, self))
        except ValueError:
            return []
        words: list[str] = []
        for word in raw:
            array = ARRAY.match(word)
            found = self.arrays.get(array[1], []) if array else [self.expanded(word)]
            self.budget.take(sum(len(one) + 1 for one in found), word)
            words += found
        return words

    def expanded(self, text: str) -> str:
        """The text with variables in place; an unset one without a default stays ``${NAME}``."""

        def value(found: re.Match[str]) -> str:
            name, operator, otherwise = found[1] or found[2], found[3], found[4]
            if name in self.names:
                self.budget.take(len(self.names[name]), text)
                return self.names[name]
            if otherwise is None:
                return f"${{{name}}}"
            known = self.expanded(otherwise)
            if operator == "=":
                self.names[name] = known
            return known

        return VARIABLE.sub(value, text)

    def unsure(self, line: str) -> None:
        """A line that may run or not: variables that it sets have no known value from here on."""
        for name in SET.findall(line):
            self.names[name] = f"$({name} is set in a condition or loop)"


def split(text: str) -> list[str]:
    """The words of a text, as ``shlex.split``, which takes quadratic time for a long word, does.

    ValueError if a quote is not closed, or nothing follows a backslash.
    """
    words, parts, at = list[str](), list[str](), 0
    while at < len(text):
        if (found := PIECE.match(text, at)) is None:
            raise ValueError(f"no part of a word begins with {text[at : at + 20]!r}")
        at, kind, part = found.end(), found.lastgroup, found[found.lastgroup or 0]
        if kind != "space":
            parts.append(re.sub(r'\\(["\\])', r"\1", part) if kind == "double" else part)
        if parts and (kind == "space" or at == len(text)):
            words.append("".join(parts))
            parts = []
    return words


def _read_line(line: str, script: Script, variables: _Variables) -> None:
    found = ASSIGNMENT.match(line)
    if found and found[3].startswith("("):
        more = variables.words(found[3].strip()[1:-1])
        if found[2]:
            variables.arrays.setdefault(found[1], []).extend(more)
        else:
            variables.arrays[found[1]] = more
        return
    words = variables.words(line)
    if found and len(words) == 1 + line.startswith(("export ", "local ", "readonly ")):
        variables.names[found[1]] = words[-1].partition("=")[2]
    elif found and words and UNKNOWN.search(words[0]):
        variables.names[found[1]] = f"$({line[:80]})"
    elif words:
        script.commands.append(words)


def _with_sums(text: str, variables: _Variables) -> str:
    """The text with each ``$((…))`` replaced by its value, if all of its names are numbers."""
    parts, end = list[str](), 0
    while (start := text.find("$((", end)) >= 0:
        parts.append(text[end:start])
        depth, end = 0, start + 1
        while end < len(text):
            depth += {"(": 1, ")": -1}.get(text[end], 0)
            end += 1
            if depth == 0:
                break
        inner = re.sub(r"(?<![\w$])([A-Za-z_]\w*)", r"${\1}", text[start + 3 : end - 2])
        inner = variables.expanded(inner).strip()[:MAX_SUM]
        try:
            parts.append(str(_sum(ast.parse(inner, mode="eval").body)))
        except (SyntaxError, ValueError, ZeroDivisionError):
            parts.append(f"$({re.sub('[^A-Za-z0-9_+*/%()-]', '', inner[:80])})")
    return "".join([*parts, text[end:]])


def _sum(node: ast.AST) -> int:
    if isinstance(node, ast.Constant) and isinstance(node.value, int):
        return node.value
    if isinstance(node, ast.BinOp) and type(node.op) in OPERATIONS:
        return OPERATIONS[type(node.op)](_sum(node.left), _sum(node.right))
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        return -_sum(node.operand)
    raise ValueError(ast.dump(node))


def _logical_lines(text: str) -> Iterator[str]:
    """Lines without comments; continued ones, open quotes and open arrays as one."""
    quote, line, parentheses = "", "", 0
    at_word = True
    skip = False
    for position, character in enumerate(text):
        following = text[position + 1 : position + 2]
        if skip:
            skip = character != "\n"
            if skip:
                continue
        if not quote and character == "#" and at_word:
            skip = True
            continue
        if character == "\\" and following == "\n":
            continue
        if character == "\n" and text[position - 1 : position] == "\\" and not skip:
            line += " "
            at_word = True
            continue
        if character in "\"'" and quote in ("", character):
            quote = "" if quote else character
        if not quote:
            parentheses += {"(": 1, ")": -1}.get(character, 0)
        at_word = character.isspace() or character == ";"
        if character == "\n" and not quote and parentheses <= 0:
            if line.strip():
                yield line.strip()
            line, parentheses = "", 0
        else:
            line += character
    if line.strip():
        yield line.strip()


def overrides(words: Iterable[str], budget: Budget) -> dict[str, Any]:
    """The dotted keys with their values; a later one replaces an earlier one.

    A key that is taken away has a ``~`` before it. SyntaxError if they are more than the budget.
    """
    found: dict[str, Any] = {}
    for word in words:
        if removed := REMOVED.match(word):
            found[f"~{removed[1]}"] = None
        if one := OVERRIDE.match(word):
            text = KEY.sub(r"\1: ", one[2]) if one[2].startswith("{") else one[2]
            found |= flat(value_of(text), budget, one[1])
    return found


def flags(words: list[str], budget: Budget) -> dict[str, Any]:
    """``--name value …``, ``--name=value`` and ``--name`` alone, which is true.

    Several values are a list. Shell operators (``2>&1``, ``|``) end the flags. SyntaxError
    if they are more than the budget.
    """
    found: dict[str, Any] = {}
    name, ended = (
        "",
        next((at for at, one in enumerate(words) if ENDS_FLAGS.match(one)), len(words)),
    )
    for word in words[:ended]:
        if flag := FLAG.match(word):
            name = flag[1].replace("-", "_")
            found[name] = True if flag[2] is None else value_of(flag[2])
        elif word.endswith(".py"):
            name = ""  # the launcher's flags end, and the script's begin
        elif name:
            value, before = value_of(word), found[name]
            if isinstance(before, list):
                before.append(value)
            else:
                found[name] = value if before is True else [before, value]
    for name, value in found.items():
        budget.take(len(name) + len(str(value)), name)
    return found


def value_of(text: str) -> Any:
    """A number, a switch, a list or a text, as YAML reads it; a text if it is not YAML.

    An Expression for one that only running the script would give.
    """
    if UNKNOWN.search(text):
        return Expression(text)
    try:
        return load_yaml(text)
    except YamlError:
        return text.strip("\"'")
