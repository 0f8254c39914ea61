"""The code of README.md and docs/: configs are valid, commands parse, Python code imports.

A config that is a part of one is merged into a small one. The commands are parsed, and not run
(tests/test_tutorial.py runs those of docs/tutorial.md); words in capitals stand for values.
"""

from __future__ import annotations

import ast
import importlib
import re
import shlex
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import yaml

from async_opd import cli
from async_opd.config.load import load_config

ROOT = Path(__file__).parent.parent
PAGES = {
    str(path.relative_to(ROOT)): path.read_text()
    for path in (ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md")))
}
FENCE = re.compile(r"^```(\w*)\n(.*?)^```", flags=re.DOTALL | re.MULTILINE)
SMALL: dict[str, Any] = {
    "student": {"model": "student"},
    "teachers": {"math": {"model": "teacher"}},
    "data": {"train": ["train.jsonl"], "eval": ["eval.jsonl"]},
    "loss": {"kind": "forward_kl", "top_k": 64},
    "train": {"steps": 1000, "batch_size": 128, "lr": 1e-5},
}
"""What every config has. A ``steps`` or ``teachers`` of a part is in place of these."""


BLOCKS = [
    pytest.param(*found.groups(), id=f"{page}:{text.count(chr(10), 0, found.start()) + 1}")
    for page, text in PAGES.items()
    for found in FENCE.finditer(text)
    if found[1] in ("", "bash", "console", "python", "yaml")
]


@pytest.mark.parametrize(("language", "text"), BLOCKS)
def test_a_block_of_code_is_right(
    language: str, text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if language == "yaml":
        monkeypatch.setenv("DATA", "/data")
        check_config(yaml.safe_load(text))
    elif language == "python":
        check_names(ast.parse(text))
    else:
        continued = re.sub(r"\\\n\s+|\n {12,}(?=\[)", " ", text)
        for line in re.findall(r"^(?:\$ )?(async_opd .*)", continued, flags=re.MULTILINE):
            check_command(words_of(line))


def check_config(part: dict[str, Any]) -> None:
    """A config or a part of one is valid."""
    merged = SMALL | part
    for key in ("data", "train"):
        merged[key] = SMALL[key] | part.get(key, {})
    load_config(merged)


def words_of(line: str) -> list[str]:
    """The words after async_opd. Of ``A|B`` the first one; N and F are numbers; … is nothing."""
    line = re.split(r" {2,}(?=[a-z#])", line.removeprefix("$ "))[0]
    while inner := re.search(r"\[[^\[\] ]*\](?=[\w=\]])", line):  # of [NAME=]MODEL, MODEL is left
        line = line.replace(inner[0], "")
    words = shlex.split(re.sub(r"[\[\]…]", " ", line), comments=True)[1:]
    return ["1" if word in "NF" else word.split("|")[0] for word in words]


def check_command(words: list[str]) -> None:
    """A command and its options are of the command line, and its overrides are keys."""
    arguments, rest = cli.parser().parse_known_args(words)
    overrides = [*getattr(arguments, "overrides", []), *rest]
    assert [word for word in rest if word.startswith("-")] == [], words
    assert not rest or "overrides" in arguments, words
    overrides += getattr(arguments, "set", None) or []
    load_config(SMALL, [one for one in overrides if one != "a.b.c=value"])


def check_names(tree: ast.AST) -> None:
    """Names of ``from module import name``, and attributes of modules that are imported, exist."""
    modules = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module:
            for name in node.names:
                assert hasattr(importlib.import_module(node.module), name.name), name.name
        elif isinstance(node, ast.Import):
            modules |= {name.name: importlib.import_module(name.name) for name in node.names}
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and ast.unparse(node.value) in modules:
            assert hasattr(modules[ast.unparse(node.value)], node.attr), ast.unparse(node)


def test_commands_and_options_named_in_a_text_exist() -> None:
    """In a text a command may be named without what it needs: `async_opd doctor --engines`."""
    (known,) = (one for one in cli.parser()._actions if isinstance(one.choices, dict))
    for page, text in PAGES.items():
        for named in re.findall(r"`async_opd ([^`]+)`", FENCE.sub("", text)):
            name, *words = re.sub(r"[\[\]…]", " ", named).split()
            if not name.startswith("-"):
                options = known.choices[name]._option_string_actions
                unknown = [one for one in words if one.startswith("-") and one not in options]
                assert unknown == [], f"{page}: {named}"


def test_modules_and_targets_that_are_run_exist() -> None:
    makefile = (ROOT / "Makefile").read_text()
    for page, text in PAGES.items():
        for module in re.findall(r"python -m (benchmarks[.a-z_]*[a-z])", text):
            assert find_spec(module), f"{page}: {module}"
        for target in re.findall(r"`make ([a-z-]+)", text):
            assert f"\n{target}:" in makefile, f"{page}: make {target}"


# ── links ──────────────────────────────────────────────────────────────────────────────────────

LINKING = [*PAGES, "CONTRIBUTING.md", "CHANGELOG.md"]


def anchors(path: Path) -> set[str]:
    """The anchors of a page's headings."""
    headings = re.findall(r"^#+ (.+)$", FENCE.sub("", path.read_text()), flags=re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", one).strip().lower().replace(" ", "-") for one in headings}


def test_every_link_leads_to_a_file_and_a_heading() -> None:
    for page in LINKING:
        text = FENCE.sub("", (ROOT / page).read_text())
        for link in re.findall(r"\]\((?!\w+:)([^)\s]+)\)", text):
            name, _, heading = link.partition("#")
            to = (ROOT / page).parent / name if name else ROOT / page
            assert to.exists(), f"{page}: {link}"
            assert not heading or heading in anchors(to), f"{page}: {link}"
