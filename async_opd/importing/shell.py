"""Commands of a shell script, with its variables in place: parsed, never executed.

Read are assignments, arrays, ``${NAME:-default}``, ``$((…))`` and commands at the top level.
What stands inside of ``if``, loops, functions and ``$(…)`` is not read, and is reported.
"""

from __future__ import annotations

import ast
import operator
import re
import shlex
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

ASSIGNMENT = re.compile(r"^(?:export\s+|local\s+|readonly\s+)?([A-Za-z_]\w*)(\+?)=(.*)$", re.DOTALL)
VARIABLE = re.compile(r"\$(?:(\w+)|\{(\w+)(?::?[-=]((?:[^{}]|\{[^{}]*\})*))?\})")
ARRAY = re.compile(r"^\$\{(\w+)\[@\]\}$")
OPENS = ("if", "for", "while", "until", "case")
CLOSES = ("fi", "done", "esac")
MAX_CHARACTERS = 1 << 16
"""Bound of a value, and of an array, with variables in place."""
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


def read_shell(text: str) -> Script:
    """The commands of a script, with variables and arrays expanded as far as the script sets them.

    ``$NAME`` of the environment stays ``${NAME}``. SyntaxError for a value, or an array, of more
    than MAX_CHARACTERS: a few lines can double it beyond all memory.
    """
    script, names, arrays = Script(), dict[str, str](), dict[str, list[str]]()
    depth = 0
    for line in _logical_lines(text):
        first = line.split(None, 1)[0].rstrip(";")
        opens = first in OPENS or bool(re.match(r"^(function\s+)?\w+\s*\(\)", line))
        if opens and depth == 0:
            script.skipped.append(line.splitlines()[0])
        if opens or depth:
            depth += _change(line, opens)
            continue
        _read_line(line, script, names, arrays)
    return script


def _change(line: str, opens: bool) -> int:
    words = re.findall(r"[\w{}]+", line)
    closed = sum(word in CLOSES for word in words) + (words[-1:] == ["}"] and not opens)
    return int(opens) - closed


def _read_line(
    line: str, script: Script, names: dict[str, str], arrays: dict[str, list[str]]
) -> None:
    found = ASSIGNMENT.match(line)
    if found and found[3].startswith("("):
        words = _words(found[3].strip()[1:-1], names, arrays)
        arrays[found[1]] = [*(arrays.get(found[1], []) if found[2] else []), *words]
        _bound(sum(map(len, arrays[found[1]])), found[1])
        return
    words = _words(line, names, arrays)
    if found and len(words) == 1 + line.startswith(("export ", "local ", "readonly ")):
        names[found[1]] = words[-1].partition("=")[2]
    elif words:
        script.commands.append(words)


def _bound(characters: int, what: str) -> None:
    if characters > MAX_CHARACTERS:
        raise SyntaxError(f"{what[:80]} has more than {MAX_CHARACTERS:,} characters")


def _words(text: str, names: dict[str, str], arrays: dict[str, list[str]]) -> list[str]:
    try:
        raw = shlex.split(_with_sums(text, names))
    except ValueError:  # an unclosed quote
        return []
    words: list[str] = []
    for word in raw:
        array = ARRAY.match(word)
        words += arrays.get(array[1], []) if array else [_expanded(word, names)]
    return words


def _expanded(text: str, names: dict[str, str]) -> str:
    """The text with the script's variables; an unset one without a default stays ``${NAME}``."""

    def value(found: re.Match[str]) -> str:
        name, otherwise = found[1] or found[2], found[3]
        if name in names:
            return names[name]
        if otherwise is not None:
            return _expanded(otherwise, names)
        return f"${{{name}}}" if not name.isdigit() else ""

    expanded = VARIABLE.sub(value, text)
    _bound(len(expanded), text)
    return expanded


def _with_sums(text: str, names: dict[str, str]) -> str:
    """The text with each ``$((…))`` replaced by its value, if all of its names are numbers."""
    while (start := text.find("$((")) >= 0:
        depth, end = 0, start + 1
        while end < len(text):
            depth += {"(": 1, ")": -1}.get(text[end], 0)
            end += 1
            if depth == 0:
                break
        inner = re.sub(r"(?<![\w$])([A-Za-z_]\w*)", r"${\1}", text[start + 3 : end - 2])
        try:
            result = str(_sum(ast.parse(_expanded(inner, names).strip(), mode="eval").body))
        except (SyntaxError, ValueError, ZeroDivisionError):
            result = "''"
        text = text[:start] + result + text[end:]
    return text


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
