"""Docs that are made from the code are up to date; what they name exists.

``docs/status.md`` names every module with a path that only GPUs take, and what shows that part.
"""

from __future__ import annotations

import ast
import re
import runpy
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent


def test_the_config_reference_is_what_the_code_says() -> None:
    made = runpy.run_path(str(ROOT / "docs" / "make_config.py"))["document"]()
    assert (ROOT / "docs" / "config.md").read_text() == made, "run python docs/make_config.py"


def test_the_list_of_metrics_is_what_the_catalogue_says() -> None:
    made = runpy.run_path(str(ROOT / "docs" / "make_metrics.py"))["document"]()
    assert (ROOT / "docs" / "metrics.md").read_text() == made, "run python docs/make_metrics.py"


def test_every_page_is_in_the_navigation_of_the_site() -> None:
    named = re.findall(r"([\w/.-]+\.md)$", (ROOT / "mkdocs.yml").read_text(), flags=re.MULTILINE)
    pages = {str(page.relative_to(ROOT / "docs")) for page in (ROOT / "docs").rglob("*.md")}
    assert pages - set(named) == set(), "mkdocs.yml: a line for each of these below nav"


def test_every_file_named_in_the_architecture_exists() -> None:
    text = (ROOT / "docs" / "architecture.md").read_text()
    folders = "[a-z_]+"
    named = set(re.findall(rf"`((?:{folders})/[\w/]+\.py)", text))
    found = {
        name for name in named for root in (ROOT, ROOT / "async_opd") if (root / name).exists()
    }
    assert named - found == set()


def test_every_test_file_that_the_docs_name_exists() -> None:
    pages = [*(ROOT / "docs").glob("*.md"), ROOT / "README.md", ROOT / "CONTRIBUTING.md"]
    named = {name for page in pages for name in re.findall(r"\btest_\w+\.py\b", page.read_text())}
    assert named - {file.name for file in (ROOT / "tests").rglob("test_*.py")} == set()


# ── docs/status.md: part | modules | shown by ──────────────────────────────────────────────────

PACKAGES = ("async_opd", "rollouter", "teachers", "trainer")
GPU_NAMES = {"cuda", "nccl"}
"""What a device or a collective library is called, and torch's module."""
GPU_ATTRIBUTES = {"cuda", "is_cuda", "is_cpu", "accelerator", "is_nccl_available"}
SHOWN = {"contract", "CPU", "GPU", "pretended GPUs", "nothing"}
CODE = r"`([\w./]+)`"


def gpu_only(source: str) -> bool:
    """Whether a module branches on the device, names a GPU's device or library, or calls it.

    Docstrings, texts with further words and type annotations do not count.
    """
    return any(_of_gpus(node) for node in _code(ast.parse(source)))


def _code(node: ast.AST) -> Iterator[ast.AST]:
    for child in ast.iter_child_nodes(node):
        words = isinstance(child, ast.Expr) and isinstance(child.value, ast.Constant)
        kinds = isinstance(child, ast.Subscript) and ast.unparse(child.value) == "Literal"
        if not (words or kinds):
            yield child
            yield from _code(child)


def _of_gpus(node: ast.AST) -> bool:
    if isinstance(node, ast.Constant):
        return node.value in GPU_NAMES
    if isinstance(node, ast.Attribute):
        return node.attr in GPU_ATTRIBUTES
    if isinstance(node, ast.Compare):
        sides = (node.left, *node.comparators)
        return any(isinstance(one, ast.Constant) and one.value == "cpu" for one in sides)
    return False


def table() -> list[list[str]]:
    """The cells of every line of the table."""
    text = (ROOT / "docs" / "status.md").read_text()
    found = [line for line in text.splitlines() if line.startswith("| ")]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in found][1:]


LINES = table()


def test_every_module_with_a_path_of_gpus_has_a_line() -> None:
    files = [path for package in PACKAGES for path in (ROOT / package).rglob("*.py")]
    paths = {str(file.relative_to(ROOT)) for file in files if gpu_only(file.read_text())}
    named = {name for line in LINES for name in re.findall(CODE, line[1])}
    assert paths
    assert sorted(paths - named) == [], "docs/status.md: a line for each of these"


def test_every_module_of_the_table_exists() -> None:
    named = {name for line in LINES for name in re.findall(CODE, line[1])}
    assert sorted(name for name in named if not (ROOT / name).is_file()) == []


@pytest.mark.parametrize("line", LINES, ids=lambda line: line[0][:40])
def test_every_line_names_the_tests_that_show_its_part(line: list[str]) -> None:
    for one in line[2].split(";"):
        how, _, by = one.strip().partition(":")
        assert how in SHOWN, f"{how!r} is none of {sorted(SHOWN)}"
        named = re.findall(CODE, by)
        assert bool(named) == (how != "nothing"), f"no test is named: {one}"
        assert [name for name in named if not (ROOT / name).exists()] == []


def test_what_a_gpu_has_shown_has_figures() -> None:
    """docs/gpu.md has the figures of runs on GPUs, between two marks."""
    shown = [line[0] for line in LINES if re.search(r"(^|; )GPU:", line[2])]
    text = (ROOT / "docs" / "gpu.md").read_text()
    figures = text.partition("<!-- figures: begin -->")[2].partition("<!-- figures: end -->")[0]
    assert not shown or figures.strip(), f"docs/gpu.md has no figures, but of: {shown}"
