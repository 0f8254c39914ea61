"""Docs that are made from the code are up to date; what the README names exists."""

from __future__ import annotations

import re
import runpy
from pathlib import Path

ROOT = Path(__file__).parent.parent


def test_the_config_reference_is_what_the_code_says() -> None:
    made = runpy.run_path(str(ROOT / "docs" / "make_config.py"))["document"]()
    assert (ROOT / "docs" / "config.md").read_text() == made, "run python docs/make_config.py"


def test_every_link_of_the_readme_leads_somewhere() -> None:
    links = re.findall(r"\]\(([^)#]+)\)", (ROOT / "README.md").read_text())
    assert [link for link in links if not (ROOT / link).exists()] == []


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
