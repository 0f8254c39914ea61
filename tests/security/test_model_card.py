"""A stranger's run in a model card: it reveals no file of the exporter, and writes no markdown."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.fuzz.command import command
from tests.tools.test_export import run_of


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return run_of(tmp_path_factory.mktemp("theirs"))


@pytest.fixture
def card(run_dir: Path, tmp_path: Path) -> Callable[..., str]:
    """The card of the run with other values in its config."""
    file, before = run_dir / "config.yaml", (run_dir / "config.yaml").read_text()

    def written(**values: Any) -> str:
        file.write_text(yaml.safe_dump(yaml.safe_load(before) | values))
        said = command("export", str(run_dir), str(tmp_path / "out"))
        file.write_text(before)
        assert said.code == 0, said
        return (tmp_path / "out" / "README.md").read_text()

    return written


def body(card: str) -> str:
    """The card without its front matter and config."""
    return card.partition("\n# ")[2].partition("\n## Config")[0]


def test_no_digest_of_a_file_that_the_config_names_is_in_the_card(
    card: Callable[..., str], tmp_path: Path
) -> None:
    key = tmp_path / "id_rsa"
    key.write_text("private")
    found = card(data={"train": [str(key)]})
    assert hashlib.sha256(b"private").hexdigest() not in found
    assert "| data | id\\_rsa |" in found
    assert "| data | SHA-256 of all training prompts and answers: d1g35t |" in found


def test_no_variable_of_the_environment_is_in_the_card(
    card: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("BUILD_HOST", "internal-7")
    found = card(data={"train": ["${BUILD_HOST}"]})
    assert "internal-7" not in found
    assert "| data | ${BUILD\\_HOST} |" in found


NAMES = [
    "[click](https://evil.example)",
    "<img src=//evil.example/x>",
    "![x](//evil.example/x.png)",
    "see https://evil.example or www.evil.example",
    "a | b",
    "a `b` **c** ~~d~~ _e_",
]


@pytest.mark.parametrize("name", NAMES)
def test_a_name_is_text_on_one_line(card: Callable[..., str], name: str) -> None:
    from markdown_it import MarkdownIt

    found = body(card(name=name))
    title = MarkdownIt().enable("strikethrough").parse(f"# {found}")[1]
    assert {one.type for one in title.children or []} == {"text"}
    assert "https://" not in found  # a bare address is a link, too
    assert "www." not in found


def test_the_name_of_a_metric_is_text_on_one_line(run_dir: Path, card: Callable[..., str]) -> None:
    summary = {"status": "completed", "eval/a\n# Not a heading\n|": 0.75}
    (run_dir / "summary.json").write_text(json.dumps(summary))
    found = body(card())
    assert "| eval/a\\\\n\\# Not a heading\\\\n\\| | 0.75 |" in found.splitlines()


def test_a_value_does_not_break_the_row_of_a_table(card: Callable[..., str]) -> None:
    student = {"model": "a | b\\|c | [d](https://evil.example)"}
    teachers = {"t | u": {"model": "<b>"}}
    rows = body(card(student=student, teachers=teachers)).splitlines()
    lineage = [line for line in rows if "evil" in line or "teacher" in line]
    assert len(lineage) == 2
    for line in lineage:
        assert line.replace("\\\\", "").replace("\\|", "").count("|") == 3


def test_the_fence_of_the_config_is_longer_than_any_in_it(card: Callable[..., str]) -> None:
    text = "```\n````\n# Not a heading"
    found = card(student={"model": "s", "chat_template_kwargs": {"text": text}})
    config = found.partition("</summary>\n\n")[2]
    assert config.startswith("`````yaml\n")
    assert config.endswith("\n`````\n\n</details>\n")
