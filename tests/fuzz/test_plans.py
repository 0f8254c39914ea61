"""Run directories that are planned: whatever is in them, it works or says what is wrong."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from async_opd.config.load import dump_config, load_config
from tests.fuzz.command import command, good, written
from tests.fuzz.conftest import examples

pytestmark = pytest.mark.slow

VALUES = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=6)
NAMES = st.sampled_from(
    [
        "step",
        "time",
        "train/busy",
        "train/busy_s",
        "train/compute_s",
        "train/tokens",
        "train/mean_response_tokens",
        "train/std_response_tokens",
        "rollout/tokens_per_s",
        "rollout/request_s",
        "teacher/sort/busy_s",
        "teacher/sort/tokens_per_s",
        "sync/seconds",
        "perf/step_s",
    ]
)
LINES = st.lists(
    st.binary(max_size=12)
    | st.dictionaries(NAMES, VALUES, max_size=8).map(json.dumps).map(str.encode),
    max_size=6,
).map(b"\n".join)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("plans")


@examples(40)
@given(
    files=st.dictionaries(
        st.sampled_from(["metrics.jsonl", "summary.json", "config.yaml", "trace.json"]), LINES
    )
)
def test_any_run_directory(folder: Path, files: dict[str, bytes]) -> None:
    run = folder / "run"
    run.mkdir(exist_ok=True)
    for old in run.iterdir():
        old.unlink()
    (run / "config.yaml").write_text(dump_config(load_config(written(folder, good(folder)))))
    for name, content in files.items():
        (run / name).write_bytes(content)
    said = command("plan", str(run))
    assert said.code == 2
    assert said.err.splitlines()[0].endswith("with the input:")
