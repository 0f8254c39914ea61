"""Docs that are made from the code are up to date; the files that they name exist."""

from __future__ import annotations

import re
import runpy
from pathlib import Path

from async_opd.config.keys import all_keys, keys_below

ROOT = Path(__file__).parent.parent


def test_the_config_reference_is_what_the_code_says() -> None:
    made = runpy.run_path(str(ROOT / "docs" / "make_config.py"))["document"]()
    assert (ROOT / "docs" / "config.md").read_text() == made, "run python docs/make_config.py"


def test_the_config_reference_has_the_name_of_every_key() -> None:
    named = re.findall(r"^\| `([^`]+)`", (ROOT / "docs" / "config.md").read_text(), re.MULTILINE)
    plain = {key for key in all_keys() if not keys_below(key)}
    plain -= {"data.train", "data.eval", "cold_start.data"}  # sections that have kinds
    names = {key.rpartition(".")[2] for key in named}
    assert {key for key in plain if key.rpartition(".")[2] not in names} == set()


def test_the_list_of_metrics_is_what_the_catalogue_says() -> None:
    made = runpy.run_path(str(ROOT / "docs" / "make_metrics.py"))["document"]()
    assert (ROOT / "docs" / "metrics.md").read_text() == made, "run python docs/make_metrics.py"


def test_the_tables_of_scaling_are_what_the_code_says() -> None:
    made = runpy.run_path(str(ROOT / "docs" / "make_scaling.py"))["document"]()
    assert (ROOT / "docs" / "scaling.md").read_text() == made, "run python docs/make_scaling.py"


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


def test_every_file_in_the_table_of_the_status_exists() -> None:
    cells = re.findall(r"^\| .*", (ROOT / "docs" / "status.md").read_text(), flags=re.MULTILINE)
    named = {name for cell in cells for name in re.findall(r"`([\w.]+/[\w./]+)`", cell)}
    assert named
    assert sorted(name for name in named if not (ROOT / name).exists()) == []
