"""Checkpoints and run directories: whatever is in them, nothing strange is loaded, and it ends."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from async_opd import run as run_module
from async_opd.accounting.ledger import LedgerState
from async_opd.accounting.run_state import Cut
from async_opd.checkpoint.resume import identity
from async_opd.checkpoint.store import CONFIG, CUT, MANIFEST, Checkpoints, _Manifest
from async_opd.checks.preflight import preflight
from async_opd.config.load import load_config
from async_opd.core.errors import CheckpointError
from async_opd.files.durable import checksum
from async_opd.files.run_format import write_run_format
from tests.conftest import make_sample
from tests.fuzz.command import Said, bounded, command, good, written
from tests.fuzz.conftest import examples
from tests.trainer.test_shards import STAMP, halves, whole
from trainer.saving.sample_file import SCORED_FILE, read_scored, write_scored
from trainer.saving.shards import Shards, shard_name, write_shard

pytestmark = pytest.mark.slow

RANK_FILES = [shard_name(rank, 2) for rank in range(2)]
FILES = st.sampled_from([CUT, CONFIG, MANIFEST, SCORED_FILE, *RANK_FILES])
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=8),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(["step", "cursor", "ledger", "config", "data", "files", "x"]), inner
        )
    ),
    max_leaves=6,
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("checkpoints")


@pytest.fixture(scope="module")
def pristine(folder: Path) -> Path:
    """A run directory with one checkpoint, of the config in ``folder``."""
    config = load_config(written(folder, good(folder)))
    store = Checkpoints(folder / "pristine" / "checkpoints", 2)
    part = store.begin(2)
    weight = halves(torch.arange(12.0).reshape(3, 4))
    files = {
        name: write_shard(
            part,
            rank,
            STAMP,
            {"model/weight": weight[rank], f"rng/{rank}/cpu": whole(torch.get_rng_state())},
        )
        for rank, name in enumerate(RANK_FILES)
    }
    files[SCORED_FILE] = write_scored(part, [make_sample("0:0#0/0")])
    ledger = LedgerState(in_flight=("0:0#0/0",), trained=4)
    rows = preflight(config, "c.yaml", 0).train
    store.commit(part, Cut(2, 2, 3, 5, ledger), identity(config, rows), files)
    write_run_format(folder / "pristine")
    (folder / "pristine" / "metrics.jsonl").write_text(
        '{"step": 1, "time": 1.0, "loss/total": 1}\n'
    )
    return folder / "pristine"


@pytest.fixture
def run_dir(folder: Path, pristine: Path) -> Callable[[], Path]:
    """A fresh copy for every example."""

    def copy() -> Path:
        shutil.rmtree(folder / "run", ignore_errors=True)
        shutil.copytree(pristine, folder / "run")
        return folder / "run"

    return copy


@pytest.fixture(autouse=True)
def no_run(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Nothing starts; what would have is remembered."""
    jobs: list[Any] = []

    async def started(job: Any) -> int:
        jobs.append(job)
        job.log.finish("completed")
        return 0

    monkeypatch.setattr(run_module, "_run", started)
    return jobs


def resumed(folder: Path, run_dir: Path) -> Said:
    """``async_opd run … --resume``: it would start, or says what is wrong."""
    config = str(folder / "config.yaml")
    said = command("run", config, "--run-dir", str(run_dir), "--resume", "log.console=off")
    assert said.code in (0, 1, 2), said
    assert said.code == 0 or said.err
    assert "Traceback" not in said.err
    return said


def sealed(checkpoint: Path) -> None:
    """Makes the manifest fit the files again, as an attacker could."""
    files = {path.name: checksum(path) for path in checkpoint.iterdir() if path.name != MANIFEST}
    (checkpoint / MANIFEST).write_bytes(_Manifest.dump_json(files))


def test_the_checkpoint_that_is_mutated_here_is_good(
    folder: Path, run_dir: Callable[[], Path], no_run: list[Any]
) -> None:
    assert resumed(folder, run_dir()).code == 0
    assert no_run[0].start.cut.step == 2


@examples(60)
@given(
    name=FILES,
    at=st.integers(0, 600),
    length=st.integers(0, 50),
    new=st.binary(max_size=20),
)
def test_a_changed_file_is_never_loaded(
    folder: Path,
    run_dir: Callable[[], Path],
    no_run: list[Any],
    name: str,
    at: int,
    length: int,
    new: bytes,
) -> None:
    made = run_dir()
    file = made / "checkpoints" / "step_2" / name
    before = file.read_bytes()
    after = before[:at] + new + before[at + length :]
    file.write_bytes(after)
    no_run.clear()
    assert resumed(folder, made).code == 0
    start = no_run[0].start
    if name != MANIFEST:
        assert (start is None) == (before != after)
    elif start is not None:
        assert json.loads(after) == json.loads(before)


@examples(40)
@given(
    name=FILES,
    kind=st.sampled_from(["gone", "empty", "folder", "pipe", "link", "loop"]),
    more=st.sampled_from(["", "step_x", "step_-1", "step_٣", "step_3", ".step_4.partial"]),
)
def test_files_of_other_kinds_are_never_loaded(
    folder: Path, run_dir: Callable[[], Path], no_run: list[Any], name: str, kind: str, more: str
) -> None:
    made = run_dir()
    file = made / "checkpoints" / "step_2" / name
    file.unlink()
    {
        "gone": lambda: None,
        "empty": file.touch,
        "folder": file.mkdir,
        "pipe": lambda: os.mkfifo(file),
        "link": lambda: file.symlink_to("/dev/zero"),
        "loop": lambda: file.symlink_to(file),
    }[kind]()
    if more:
        (made / "checkpoints" / more).mkdir()
    no_run.clear()
    assert resumed(folder, made).code == 0
    assert no_run[0].start is None


@examples(60)
@given(name=st.sampled_from([CUT, CONFIG]), changes=JSON, whole=st.booleans())
def test_contents_that_make_no_sense_are_refused_although_the_manifest_fits(
    folder: Path, run_dir: Callable[[], Path], name: str, changes: Any, whole: bool
) -> None:
    made = run_dir()
    file = made / "checkpoints" / "step_2" / name
    tree = json.loads(file.read_bytes())
    changed = tree | changes if isinstance(changes, dict) and not whole else changes
    file.write_text(json.dumps(changed))
    sealed(file.parent)
    resumed(folder, made)


@examples(60)
@given(
    key=st.sampled_from(["step", "version", "cursor", "admitted", "trained", "ledger.jsonl"]),
    value=st.integers(-(2**70), 2**70),
)
def test_counts_that_no_run_can_have_are_refused_by_name_and_at_once(
    folder: Path, run_dir: Callable[[], Path], key: str, value: int
) -> None:
    made = run_dir()
    file = made / "checkpoints" / "step_2" / CUT
    tree = json.loads(file.read_bytes())
    place = {"trained": tree["ledger"], "ledger.jsonl": tree["files"]}.get(key, tree)
    place[key] = value
    file.write_text(json.dumps(tree))
    sealed(file.parent)
    said = resumed(folder, made)
    if said.code:
        assert "cannot have" in said.err


@pytest.mark.parametrize(("key", "value"), [("cursor", 6), ("admitted", 6), ("version", 1)])
def test_the_smallest_count_too_many_is_refused(
    folder: Path, run_dir: Callable[[], Path], key: str, value: int
) -> None:
    made = run_dir()
    file = made / "checkpoints" / "step_2" / CUT
    file.write_text(json.dumps(json.loads(file.read_bytes()) | {key: value}))
    sealed(file.parent)
    said = resumed(folder, made)
    assert (said.code, f"checkpoint: {key}: found {value}" in said.err) == (2, True)


@examples(40)
@given(
    name=st.sampled_from([SCORED_FILE, *RANK_FILES]),
    at=st.integers(0, 3000),
    length=st.integers(0, 20),
    new=st.binary(max_size=20),
)
def test_the_trainers_files_are_read_as_they_were_written_or_refused(
    run_dir: Callable[[], Path], name: str, at: int, length: int, new: bytes
) -> None:
    checkpoint = run_dir() / "checkpoints" / "step_2"
    content = (checkpoint / name).read_bytes()
    (checkpoint / name).write_bytes(content[:at] + new + content[at + length :])
    with bounded(), contextlib.suppress(CheckpointError):
        read_scored(checkpoint)
        shards = Shards(checkpoint)
        for tensor in shards.names:
            shards.read(tensor)


LINES = st.lists(
    st.binary(max_size=20)
    | JSON.map(json.dumps).map(str.encode)
    | st.builds(lambda v: json.dumps({"step": 1, "loss/total": v}).encode(), JSON),
    max_size=3,
).map(b"\n".join)


@examples(60)
@given(
    files=st.dictionaries(
        st.sampled_from(
            ["metrics.jsonl", "ledger.jsonl", "dead_letters.jsonl", "summary.json", "config.yaml"]
        ),
        LINES,
    ),
    with_checkpoint=st.booleans(),
)
def test_the_other_files_of_a_run_directory(
    folder: Path, run_dir: Callable[[], Path], files: dict[str, bytes], with_checkpoint: bool
) -> None:
    made = run_dir()
    if not with_checkpoint:
        shutil.rmtree(made / "checkpoints")
    for name, content in files.items():
        (made / name).write_bytes(content)
    assert resumed(folder, made).code == 0


@pytest.mark.parametrize(
    "name",
    [
        "metrics.jsonl",
        "ledger.jsonl",
        "dead_letters.jsonl",
        "summary.json",
        "run.log",
        "checkpoints",
    ],
)
def test_folders_where_files_should_be_and_the_reverse_are_named(
    folder: Path, run_dir: Callable[[], Path], name: str
) -> None:
    made = run_dir()
    if name == "checkpoints":
        shutil.rmtree(made / name)
        (made / name).touch()
    else:
        (made / name).unlink(missing_ok=True)
        (made / name).mkdir()
    said = resumed(folder, made)
    assert said.code == 0 or name in said.err


def test_a_run_directory_that_cannot_be_made_is_named(folder: Path) -> None:
    (folder / "file").touch()
    config = str(written(folder, good(folder)))
    said = command("run", config, "--run-dir", str(folder / "file" / "run"))
    assert (said.code, "file/run cannot be written" in said.err) == (2, True)
