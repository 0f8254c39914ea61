"""Commands of a shell script, with its variables in place: parsed, never executed.

Read are assignments, arrays, ``${NAME:-default}``, ``$((…))`` and commands at the top level.
Text inside of ``if``, loops, functions and ``$(…)`` is not read, and is reported.
"""

from __future__ import annotations

import ast
import operator
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from async_opd.tools.importing.budget import Budget

ASSIGNMENT = re.compile(r"^(?:export\s+|local\s+|readonly\s+)?([A-Za-z_]\w*)(\+?)=(.*)$", re.DOTALL)
VARIABLE = re.compile(r"\$(?:(\w+)|\{(\w+)(?::?[-=]((?:[^{}]|\{[^{}]*\})*))?\})")
ARRAY = re.compile(r"^\$\{(\w+)\[@\]\}$")
PIECE = re.compile(
    r"""(?P<space>[ \t\r\n]+)|(?P<plain>[^ \t\r\n"'\\]+)|\\(?P<escaped>.)"""
    r"""|'(?P<single>[^']*)'|"(?P<double>[^"\\]*(?:\\.[^"\\]*)*)\"""",
    re.DOTALL,
)
"""A part of a word, or what is between two words."""
MAX_SUM = 10_000
"""Characters of a ``$((…))`` that are read."""
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
            name, otherwise = found[1] or found[2], found[3]
            if name in self.names:
                self.budget.take(len(self.names[name]), text)
                return self.names[name]
            if otherwise is not None:
                return self.expanded(otherwise)
            return f"${{{name}}}" if not name.isdigit() else ""

        return VARIABLE.sub(value, text)


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
            parts.append("''")
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
