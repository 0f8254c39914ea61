"""Which verifiers of the installed reasoning_gym evaluate a text, as read from its source.

Follows ``score_answer`` into every function, method and class of the package that it can reach by
name, constructors included, and collects calls of what turns text into code.
"""

from __future__ import annotations

import ast
import inspect
from collections.abc import Iterator
from typing import Any

TURNS_TEXT_INTO_CODE = {
    "eval", "exec", "compile", "__import__", "import_module", "getattr", "setattr", "globals",
    "parse_expr", "parse_latex", "parse_mathematica", "sympify", "S", "simplify", "lambdify",
    "Symbol", "symbols", "Poly", "Rational", "Integer", "Float", "N", "solve", "nsimplify",
    "query", "fromstring", "genfromtxt", "unpickle", "Unpickler", "pickle", "dill", "marshal",
    "yaml", "unsafe_load", "full_load", "system", "popen", "Popen", "run", "check_output",
    "spawn", "open", "literal_eval", "safe_eval", "numexpr", "evaluate_expression",
}  # fmt: skip
"""Names of Python's and of the packages that reasoning_gym uses, also harmless ones with text."""


def evaluations(dataset: type[Any]) -> set[str]:
    """The calls, as written, that the verifier of a task can come to."""
    seen: set[Any] = set()
    found: set[str] = set()
    waiting: list[tuple[Any, type[Any] | None]] = [
        (dataset.score_answer, dataset),
        (dataset.__init__, dataset),
    ]
    while waiting:
        function, owner = waiting.pop()
        function = inspect.unwrap(getattr(function, "__func__", function))
        if (function, owner) in seen or not _written(function):
            continue
        seen.add((function, owner))
        source = inspect.getsource(function)
        tree = ast.parse(f"if 1:\n{source}" if source[0] == " " else source)
        found |= {
            ast.unparse(node)
            for node in ast.walk(tree)
            if isinstance(node, ast.Call)
            and _called(node) in TURNS_TEXT_INTO_CODE
            and not (isinstance(node.func, ast.Name) and _followed(function, node.func.id))
        }
        waiting += _reached(function, owner, tree)
    return found


def _written(function: Any) -> bool:
    """Whether it stands in a file: dataclasses make methods that do not."""
    return inspect.isfunction(function) and not function.__code__.co_filename.startswith("<")


def _followed(function: Any, name: str) -> bool:
    """Whether it is a function of the package itself, which is read in its turn."""
    module = getattr(function.__globals__.get(name), "__module__", None)
    return str(module).startswith("reasoning_gym")


def _called(node: ast.Call) -> str:
    if isinstance(node.func, ast.Attribute):
        return "" if ast.unparse(node.func) == "re.compile" else node.func.attr
    return node.func.id if isinstance(node.func, ast.Name) else ""


def _reached(
    function: Any, owner: type[Any] | None, tree: ast.AST
) -> Iterator[tuple[Any, type[Any] | None]]:
    """Functions and all methods of classes that its names and attributes mean."""
    names = {**function.__globals__, **inspect.getclosurevars(function).nonlocals}
    for node in ast.walk(tree):
        target: Any = None
        if isinstance(node, ast.Name):
            target = names.get(node.id)
        elif isinstance(node, ast.ImportFrom) and (node.module or "").startswith("reasoning_gym"):
            module = __import__(str(node.module), fromlist=["x"])
            for name in node.names:
                yield from _members(getattr(module, name.name, None), None)
        elif isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            holder = owner if node.value.id in ("self", "cls") else names.get(node.value.id)
            target = getattr(holder, node.attr, None) if holder is not None else None
        yield from _members(target, owner)


def _members(target: Any, owner: type[Any] | None) -> Iterator[tuple[Any, type[Any] | None]]:
    if not str(getattr(target, "__module__", "")).startswith("reasoning_gym"):
        return
    if inspect.isfunction(target) or inspect.ismethod(target):
        yield target, owner
    elif inspect.isclass(target):
        for base in target.__mro__:
            if base.__module__.startswith("reasoning_gym"):
                for method in vars(base).values():
                    method = getattr(method, "__func__", getattr(method, "fget", method))
                    if inspect.isfunction(method) and method.__module__ == base.__module__:
                        yield method, target
