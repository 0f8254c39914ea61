"""The error of a contract that a library breaks; everything of vLLM that we use has a contract."""

from __future__ import annotations

import ast
import re
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

from tests.contracts import contract, imports, users


def test_a_broken_contract_names_the_function_the_version_and_what_is_needed() -> None:
    with (
        pytest.raises(AssertionError) as raised,
        contract("torch.cuda.Stream.wait", "waits for an event"),
    ):
        raise TypeError("wait() takes no arguments")
    words = str(raised.value)
    assert words.startswith(f"torch.cuda.Stream.wait of torch {torch.__version__} has changed: ")
    assert "async_opd needs that it waits for an event. Found: TypeError: wait() takes" in words


def test_a_broken_contract_names_the_modules_that_rely_on_it() -> None:
    name = "vllm.v1.metrics.loggers.PrometheusStatLogger.record"
    with (
        pytest.raises(AssertionError) as raised,
        contract(name, "records", by="rollouter/slots.py"),
    ):
        raise TypeError
    by = "rollouter/engine.py, rollouter/slots.py"
    assert f"needs that it records, for {by}. Found: TypeError" in str(raised.value)
    assert users(name) == {"rollouter/engine.py"}


# ── nothing of vLLM is forgotten ───────────────────────────────────────────────────────────────


def named(file: Path) -> set[str]:
    """The functions that a file's calls of ``contract`` name; constants of the file in them."""
    tree = ast.parse(file.read_text())
    constants = {
        target.id: node.value.value
        for node in ast.walk(tree)
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Constant)
        for target in node.targets
        if isinstance(target, ast.Name)
    }

    def text(node: ast.AST) -> str:
        if isinstance(node, ast.JoinedStr):
            return "".join(map(text, node.values))
        if isinstance(node, ast.FormattedValue):
            return text(node.value)
        if isinstance(node, ast.Name):
            return str(constants.get(node.id, ""))
        return str(node.value) if isinstance(node, ast.Constant) else ""

    calls = (node for node in ast.walk(tree) if isinstance(node, ast.Call) and node.args)
    first = (text(call.args[0]) for call in calls if ast.unparse(call.func) == "contract")
    return {name for one in first for name in re.findall(r"\bvllm(?:\.\w+)+", one)}


def test_everything_that_we_import_from_inside_of_vllm_is_named_by_a_contract() -> None:
    """Or a part of it is: ``AsyncLLM.update_weights`` for ``AsyncLLM``."""
    folder = Path(__file__).parent
    files = set(folder.glob("test_*.py")) - {Path(__file__)}
    held = {name for file in files for name in named(file)}
    inside = {name: files for name, files in imports().items() if name.count(".") > 1}
    assert inside
    left = {
        name: sorted(files)
        for name, files in inside.items()
        if not any(f"{one}.".startswith(f"{name}.") for one in held)
    }
    assert left == {}, f"tests/contracts: a contract is missing for each of {left}"


def test_what_we_import_from_vllm_itself_is_public() -> None:
    spec = find_spec("vllm")
    assert spec is not None
    tree = ast.parse(Path(str(spec.origin)).read_text())
    (public,) = (
        ast.literal_eval(node.value)
        for node in tree.body
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__"
    )
    ours = {name.rpartition(".")[2] for name in imports() if name.count(".") == 1}
    assert ours
    assert ours <= set(public)
