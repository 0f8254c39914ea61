"""Data sets of the hub: which files have the rows, and what is downloaded when."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from async_opd.checks.preflight import preflight
from async_opd.config.run_config import RunConfig
from async_opd.config.sections.data import DataConfig
from async_opd.core.errors import ConfigError, SourceError
from async_opd.core.row import Row
from async_opd.data.hub import HubSource, fetched_data, files_sized
from tests.checks.inputs import EXAMPLE, config
from tests.data.hub_server import COMMITS, Hub, serving

pytestmark = pytest.mark.slow  # each serves a hub, some to other processes

CARD = """---
configs:
- config_name: main
  data_files:
  - {split: train, path: main/train-*}
  - {split: test, path: [main/test.jsonl]}
- config_name: other
  data_files: other/*.jsonl
---
"""


def lines(file: Path, *prompts: str) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    rows = ({"prompt": one, "data_source": "sort", "answer": "1"} for one in prompts)
    file.write_text("".join(json.dumps(row) + "\n\n" for row in rows))


def parquet(file: Path, *prompts: str) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    file.parent.mkdir(parents=True, exist_ok=True)
    rows = [{"prompt": one, "data_source": "sort", "answer": "1"} for one in prompts]
    pq.write_table(pa.Table.from_pylist(rows), file)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """The files of a data set with a card."""
    made = tmp_path / "set"
    lines(made / "main" / "train-00000-of-00002.jsonl", "a", "b")
    lines(made / "main" / "train-00001-of-00002.jsonl", "c", "d", "e")
    lines(made / "main" / "test.jsonl", "t")
    lines(made / "other" / "x.jsonl", "o")
    (made / "README.md").write_text(CARD)
    return made


@pytest.fixture
def hub(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    """A hub with the folder as org/set, and org/plain with rows in the converted branch."""
    import huggingface_hub.constants as constants

    parquet(tmp_path / "converted" / "default" / "train" / "0000.parquet", "p", "q")
    (tmp_path / "plain").mkdir()
    (tmp_path / "plain" / "data.csv").write_text("x\n")
    branches = {
        "org/set@main": folder,
        "org/plain@main": tmp_path / "plain",
        "org/plain@refs/convert/parquet": tmp_path / "converted",
    }
    with serving(branches) as served:
        for name, value in {
            "ENDPOINT": served.url,
            "HF_HUB_CACHE": str(tmp_path / "cache"),
            "HUGGINGFACE_CO_URL_TEMPLATE": served.url + "/{repo_id}/resolve/{revision}/{filename}",
        }.items():
            monkeypatch.setattr(constants, name, value)
        yield served


def hf_cache() -> str:
    import huggingface_hub.constants as constants

    return constants.HF_HUB_CACHE


def source(text: str, **keys: Any) -> HubSource:
    (made,) = DataConfig(train=[text]).train
    assert isinstance(made, HubSource)
    return made.model_copy(update=keys)


def prompts(made: HubSource, start: int = 0) -> list[Any]:
    found = list(made.rows(0, DataConfig(train=[]), start))
    return [one.prompt if isinstance(one, Row) else one for one in found]


def run_config(*train: str) -> RunConfig:
    return config(f"data.train=[{', '.join(train)}]")


@pytest.mark.parametrize(
    ("text", "keys"),
    [
        ("hf:org/set", {"config": None, "split": "train"}),
        ("hf:org/set:main", {"config": "main", "split": "train"}),
        ("hf:org/set:train_sft", {"config": None, "split": "train_sft"}),
        ("hf:org/set:main:test", {"config": "main", "split": "test"}),
    ],
)
def test_a_string_names_data_set_configuration_and_split(text: str, keys: dict[str, Any]) -> None:
    made = source(text)
    assert (made.id, {key: getattr(made, key) for key in keys}) == ("org/set", keys)


@pytest.mark.parametrize(
    ("card", "parts", "expected"),
    [
        (True, ":main", "abcde"),
        (True, ":main:test", "t"),
        (True, ":other", "o"),
        (False, ":main:train", "abcde"),
        (False, ":main:test", "t"),
        (False, ":test", "t"),
        (False, ":other", "o"),
    ],
)
def test_the_card_of_a_folder_or_else_names_say_which_files_have_the_rows(
    folder: Path, card: bool, parts: str, expected: str
) -> None:
    if not card:
        (folder / "README.md").unlink()
    assert "".join(prompts(source(f"hf:{folder}{parts}"))) == expected


def test_a_split_that_is_not_there_or_could_be_several_is_refused(folder: Path) -> None:
    with pytest.raises(SourceError, match=r"no files for this configuration .*main/test.jsonl"):
        prompts(source(f"hf:{folder}:main:validation"))
    (folder / "README.md").unlink()
    lines(folder / "train_on_x" / "other.jsonl", "x")
    with pytest.raises(SourceError, match=r"several folders: name its own by `files:`"):
        prompts(source(f"hf:{folder}"))


@pytest.mark.parametrize("start", range(6))
def test_rows_go_on_over_files_from_any_position(folder: Path, start: int) -> None:
    made = source(f"hf:{folder}:main")
    assert "".join(prompts(made, start)) == "abcde"[start:]
    whole = list(made.rows(0, DataConfig(train=[])))
    assert list(made.rows(0, DataConfig(train=[]), start)) == whole[start:]
    numbers = [int(str(one.uid).rpartition(":")[2]) for one in whole if isinstance(one, Row)]
    assert numbers == sorted(set(numbers))


def test_files_before_a_position_are_counted_one_by_one(folder: Path) -> None:
    before = files_sized()
    assert "".join(prompts(source(f"hf:{folder}:main"), start=4)) == "e"
    assert files_sized() - before == 2


def test_a_run_downloads_the_split_and_notes_commit_and_files(hub: Hub) -> None:
    made = fetched_data(run_config("hf:org/set:main", "hf:org/plain"), "c.yaml")
    main, plain = made.data.train
    assert (main.revision, plain.revision) == tuple(COMMITS.values())
    assert "".join(prompts(main) + prompts(plain)) == "abcdepq"
    with pytest.raises(ConfigError) as caught:
        fetched_data(run_config("hf:org/none", "hf:org/set:main:dev"), "c.yaml")
    assert [problem.key for problem in caught.value.problems] == ["data.train[0]", "data.train[1]"]
    assert sorted({Path(name).name for name in hub.asked}) == [
        "0000.parquet", "README.md", "train-00000-of-00002.jsonl", "train-00001-of-00002.jsonl",
    ]  # fmt: skip


def test_a_streamed_data_set_is_downloaded_file_by_file(hub: Hub) -> None:
    (made,) = fetched_data(
        run_config("{kind: hub, id: org/set, config: main, stream: true}"), ""
    ).data.train
    rows = made.rows(0, DataConfig(train=[]))
    assert [next(rows).prompt for _ in "ab"] == ["a", "b"]
    assert "main/train-00001-of-00002.jsonl" not in hub.asked
    assert next(rows).prompt == "c"
    assert "main/train-00001-of-00002.jsonl" in hub.asked


def test_check_downloads_nothing_and_reads_what_is_in_the_cache(hub: Hub) -> None:
    made = run_config("hf:org/set:main")
    before = preflight(made, "c.yaml", 0)
    assert hub.asked == []
    assert any("org/set:main:train is not in the local cache" in note for note in before.notes)
    fetched_data(made, "c.yaml")
    asked = list(hub.asked)
    after = preflight(made, "c.yaml", 0)
    assert hub.asked == asked
    assert [len(rows) for rows in after.checked] == [5]


@pytest.mark.parametrize(
    ("name", "whole", "removed"),
    [
        ("org/set:main", "abcde", "main/train-00001-of-00002.jsonl"),
        ("org/plain", "pqr", "default/train/0001.parquet"),
    ],
    ids=["numbered files", "names without numbers of files"],
)
def test_a_part_of_a_split_in_the_cache_is_none(
    hub: Hub, tmp_path: Path, name: str, whole: str, removed: str
) -> None:
    parquet(tmp_path / "converted" / "default" / "train" / "0001.parquet", "r")
    fetched_data(run_config(f"hf:{name}"), "c.yaml")
    made = source(f"hf:{name}").cached()
    assert not made.absent
    assert "".join(prompts(made)) == whole
    os.unlink(str(made._path(removed)))
    assert source(f"hf:{name}").cached().absent


def test_files_that_another_program_downloaded_are_no_whole_split(hub: Hub) -> None:
    fetched_data(run_config("hf:org/plain"), "c.yaml")
    (kept,) = Path(hf_cache()).rglob("async_opd_files")
    shutil.rmtree(kept)
    assert source("hf:org/plain").cached().absent
    named = source("hf:org/plain", files=["default/train/0000.parquet"])
    assert "".join(prompts(named.cached())) == "pq"


def test_check_refuses_a_card_in_the_cache_whose_configs_are_no_sections(hub: Hub) -> None:
    fetched_data(run_config("hf:org/set:main"), "c.yaml")
    (card,) = Path(hf_cache()).rglob("README.md")
    card.write_text("---\nconfigs: [x]\n---\n")
    made = config("data.train=[hf:org/set:main]", "eval.grader=nonsense")
    unclear, other = preflight(made, "c.yaml", 0).problems
    assert "README.md cannot be read (configs has str in the place of a section)" in unclear.message
    assert (unclear.key, other.key) == ("data.train[0]", "eval.grader")


OFFLINE = """
import sys
from async_opd.config.load import load_config
from async_opd.checks.preflight import preflight
from async_opd.data.hub import fetched_data

made = fetched_data(load_config(sys.argv[1], ["data.train=[hf:org/set:main]"]), "c.yaml")
print([len(rows) for rows in preflight(made, "c.yaml", 0).checked])
"""


@pytest.mark.slow
def test_with_a_cache_a_run_starts_offline(hub: Hub, tmp_path: Path) -> None:
    env = {**os.environ, "HF_ENDPOINT": hub.url, "HF_HUB_CACHE": str(tmp_path / "cache")}
    for extra in ({}, {"HF_HUB_OFFLINE": "1", "HF_ENDPOINT": "http://127.0.0.1:9"}):
        command = [sys.executable, "-c", OFFLINE, str(EXAMPLE)]
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=120, env={**env, **extra}
        )
        assert done.stdout == "[5]\n", done.stderr
