"""A data set's card is a stranger's YAML: a few lines of it do not become much memory."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from async_opd.config.yaml_text import YamlError, load_yaml
from async_opd.core.errors import SourceError
from async_opd.data.hub import HubSource
from tests.security.hostile_data import GOOD, lines

NESTED = "".join(
    f"{name}: &{name} [{', '.join([below] * 10)}]\n"
    for name, below in zip("bcdef", ["x" * 10, "*b", "*c", "*d", "*e"], strict=True)
)
"""100,000 texts in a few lines."""


def read(folder: Path, card: str) -> None:
    lines(folder / "train.jsonl", [GOOD])
    (folder / "README.md").write_text(f"---\n{card}\n---\nwords\n")
    source = HubSource(kind="hub", id=str(folder))
    assert source._named() == ["train.jsonl"]


@pytest.mark.parametrize(
    "configs",
    [
        "[*f, *f]",
        "[{config_name: default, data_files: [{split: train, path: [*f, *f]}]}]",
    ],
)
def test_aliases_of_a_card_are_bounded(tmp_path: Path, configs: str) -> None:
    with pytest.raises(SourceError, match=r"README\.md cannot be read .*with its aliases expanded"):
        read(tmp_path, f"{NESTED}configs: {configs}")


def test_a_long_text_that_many_aliases_repeat_is_refused() -> None:
    repeated = ", ".join(["*a"] * 5000)
    with pytest.raises(YamlError, match="with its aliases expanded"):
        load_yaml(f"a: &a {'x' * 10_000}\nb: [{repeated}]")


def test_a_long_text_by_itself_is_read() -> None:
    text = "x" * 1_000_000
    assert load_yaml(f"a: {text}") == {"a": text}


@pytest.mark.parametrize("path", ["{a: b}", "[[train.jsonl]]", "7", "[7]"])
def test_a_path_of_a_card_is_a_text_or_texts(tmp_path: Path, path: str) -> None:
    files = f"configs: [{{data_files: [{{split: train, path: {path}}}]}}]"
    with pytest.raises(SourceError, match="neither a text nor a list of texts"):
        read(tmp_path, files)


def test_the_paths_of_a_card_are_bounded(tmp_path: Path) -> None:
    paths = json.dumps([f"*{number}.jsonl" for number in range(1001)])
    with pytest.raises(SourceError, match="more than 1000 paths"):
        read(tmp_path, f"configs: [{{data_files: [{{split: train, path: {paths}}}]}}]")


def test_the_yaml_of_a_card_is_bounded(tmp_path: Path) -> None:
    with pytest.raises(SourceError, match="its YAML has more than"):
        read(tmp_path, "x: " + "a" * (1 << 20))


@pytest.mark.parametrize("path", ["train.jsonl", "[train.jsonl]", "'*.jsonl'"])
def test_the_files_that_a_card_names_are_found(tmp_path: Path, path: str) -> None:
    read(tmp_path, f"configs:\r\n- data_files: [{{split: train, path: {path}}}]")


def test_a_card_without_yaml_names_no_files(tmp_path: Path) -> None:
    lines(tmp_path / "train.jsonl", [GOOD])
    (tmp_path / "README.md").write_text("words\n---\nconfigs: [x]\n---\n")
    assert HubSource(kind="hub", id=str(tmp_path))._named() == ["train.jsonl"]
