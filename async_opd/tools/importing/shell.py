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
from itertools import takewhile
from typing import Any

from async_opd.config.yaml_text import YamlError, load_yaml
from async_opd.tools.importing.draft import Budget, Expression, flat

DECLARES = ("export", "local", "readonly", "declare")
ASSIGNMENT = re.compile(rf"^(?:(?:{'|'.join(DECLARES)})\s+)?([A-Za-z_]\w*)(\+?)=(.*)$", re.DOTALL)
VARIABLE = re.compile(r"\$(?:(\w+)|\{(\w+)(?::?([-=])((?:[^{}]|\{[^{}]*\})*))?\})")
UNKNOWN = re.compile(r"\$\(|`|\$[@*]|\$\{(?![A-Za-z_]\w*\})")
"""A part of a value that only running the script would give."""
ARGUMENTS = ("$@", "$*", "${@", "${*")
SET = re.compile(r"(?:^|[;&|\s])([A-Za-z_]\w*)\+?=(?!\()")
"""A variable that a line sets, which is not an array."""
QUOTED = r"""\\.|'[^']*'|"[^"\\]*(?:\\.[^"\\]*)*\""""
OUTSIDE = re.compile(QUOTED, re.DOTALL)
PART = re.compile(rf"(?P<comment>(?<![^\s;])#[^\n]*)|{QUOTED}|[^\s;#\\'\"()]+|.", re.DOTALL)
"""A comment, a text in quotes, or what is between them."""
INSIDE = r"(?:[^()]|\(_\))*"
SUBSTITUTED = rf"""\$(?:\({INSIDE.replace("_", "[^()]*")}\)|\{{[^{{}}'"]*\}})"""
"""``$(…)`` or ``${…}``, which may have spaces."""
WORD = re.compile(rf"(?:{SUBSTITUTED}|\S)+")
ARRAY = re.compile(r"^\$\{(\w+)\[@\]\}$")
PIECE = re.compile(
    r"""(?P<space>[ \t\r\n]+)|\\(?P<escaped>.)"""
    rf"""|(?P<plain>(?:{SUBSTITUTED}|[^ \t\r\n"'\\])+)"""
    r"""|'(?P<single>[^']*)'|"(?P<double>[^"\\]*(?:\\.[^"\\]*)*)\"""",
    re.DOTALL,
)
"""A part of a word, or what is between two words."""
SUM = re.compile(rf"\$\(\(({INSIDE.replace('_', INSIDE.replace('_', '[^()]*'))})\)\)")
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
BRACE = re.compile(r"(?<=\(\))[ \t]*\n[ \t]*\{")
"""Of a function, on the line behind its name."""
FUNCTION = re.compile(r"(?:function\s+[\w-]+|^[\w-]+\s*\(\s*\))(?:\s*\(\s*\))?")
OPENS = ("if", "for", "while", "until", "case", "{")
CLOSES = ("fi", "done", "esac", "}")
BEFORE = ("if", "while", "until", "elif", "then", "else", "do", "{", "!")
"""Words that a command may follow."""
OPERATIONS: dict[str, Callable[[int, int], int]] = {"Add": operator.add, "Sub": operator.sub}
OPERATIONS |= {"Mult": operator.mul, "Mod": operator.mod}
OPERATIONS |= dict.fromkeys(("Div", "FloorDiv"), operator.floordiv)


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
    for line in _logical_lines(BRACE.sub(" {", text)):
        bare = OUTSIDE.sub("_", line)
        change, function = _change(FUNCTION.sub("", bare)), FUNCTION.match(bare)
        opens = line[0] != "{" and (change > 0 or function or bare.split()[0] in OPENS)
        if opens and depth == 0:
            script.skipped.append(line.splitlines()[0])
        if opens or depth:
            depth = max(depth + change, 0)
            variables.unsure(line)
        else:
            _read_line(line, bare, script, variables)
    return script


def _change(bare: str) -> int:
    """How many blocks a line opens more than it closes, by the first words of its commands."""
    change = 0
    for command in re.split(r"[;&|\n()]", bare):
        for word in command.split():
            change += (word in OPENS) - (word in CLOSES)
            if word not in BEFORE:
                break
    return change


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
        bare = {one for one in WORD.findall(OUTSIDE.sub("_", text)) if VARIABLE.fullmatch(one)}
        for word in raw:
            array = ARRAY.match(word)
            found = self.arrays.get(array[1], []) if array else [self.expanded(word)]
            found = WORD.findall(found[0]) if word in bare else found
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

    def assign(self, word: str) -> None:
        """``NAME=value`` or ``NAME+=value``; anything else is ignored."""
        if found := ASSIGNMENT.match(word):
            before = self.names.get(found[1], f"${{{found[1]}}}") if found[2] else ""
            self.budget.take(len(before), word)
            self.names[found[1]] = before + found[3]

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


def _read_line(line: str, bare: str, script: Script, variables: _Variables) -> None:
    """A command, or assignments; those of a list of commands may not be done: ``a && b=1``."""
    found = ASSIGNMENT.match(line)
    if several := re.search(r"&&|\|\||;", bare):
        variables.unsure(line)
        script.skipped += [line.splitlines()[0]] * ("=(" in bare)
    elif found and found[3].startswith("("):
        words = variables.words(found[3].strip()[1:-1])
        before = variables.arrays.get(found[1], []) if found[2] else []
        before += words
        variables.arrays[found[1]] = before
        return
    words = variables.words(line)
    declared = words[:1] != [] and words[0] in DECLARES
    given = words[declared:]
    if found and given and given[0].count("(") > given[0].count(")"):
        variables.names[found[1]] = f"$({line[:80]})"
    elif not several and (declared or all(ASSIGNMENT.match(word) for word in words)):
        for word in given:
            variables.assign(word)
    else:
        script.commands.append([word for word in words if not word.startswith(ARGUMENTS)])
        lost = "$" if any(map(OVERRIDE.match, words)) else ARGUMENTS
        script.skipped += [word for word in words[1:] if word.startswith(lost)]


def _with_sums(text: str, variables: _Variables) -> str:
    """The text with each ``$((…))`` replaced by its value, if all of its names are numbers."""

    def value(found: re.Match[str]) -> str:
        inner = re.sub(r"(?<![\w$])([A-Za-z_]\w*)", r"${\1}", found[1])
        inner = variables.expanded(inner).strip()[:MAX_SUM]
        try:
            return str(_sum(ast.parse(inner, mode="eval").body))
        except (SyntaxError, ValueError, ZeroDivisionError):
            return f"$({re.sub('[^A-Za-z0-9_+*/%()-]', '', inner[:80])})"

    return SUM.sub(value, text)


def _sum(node: ast.AST) -> int:
    if isinstance(node, ast.Constant) and isinstance(node.value, int):
        return node.value
    if isinstance(node, ast.BinOp) and (name := type(node.op).__name__) in OPERATIONS:
        return OPERATIONS[name](_sum(node.left), _sum(node.right))
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        return -_sum(node.operand)
    raise ValueError(ast.dump(node))


def _logical_lines(text: str) -> Iterator[str]:
    """Lines without comments; continued ones, open quotes and open arrays as one."""
    line, parentheses = "", 0
    for found in PART.finditer(f"{text}\n"):
        part = found[0]
        parentheses += {"(": 1, ")": -1}.get(part, 0)
        if part == "\n" and parentheses <= 0:
            if line.strip():
                yield line.strip()
            line, parentheses = "", 0
        elif found.lastgroup is None:
            line += part.replace("\\\n", " ")
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
    found: dict[str, list[Any]] = {}
    name = ""
    for word in takewhile(lambda one: not ENDS_FLAGS.match(one), words):
        if flag := FLAG.match(word):
            name = flag[1].replace("-", "_")
            found[name] = [] if flag[2] is None else [value_of(flag[2])]
        elif word.endswith(".py"):
            name = ""  # the launcher's flags end, and the script's begin
        elif name:
            found[name].append(value_of(word))
    for name, values in found.items():
        budget.take(len(name) + len(str(values)), name)
        if any(isinstance(one, Expression) for one in values):
            found[name] = [Expression(" ".join(getattr(v, "text", str(v)) for v in values))]
    return {k: values if values[1:] else [*values, True][0] for k, values in found.items()}


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
