"""One wandb run for one run directory: resumed, rewound, each step in it once."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from io import BytesIO
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from async_opd.config.run_config import RunConfig
from async_opd.microscope import MICROSCOPE, RecordWriter
from async_opd.observability import wandb_sink
from async_opd.observability.logged_run import LoggedRun, file_of
from async_opd.observability.run_log import RunLog
from async_opd.observability.sinks import Summary
from async_opd.observability.wandb_sink import (
    AXES,
    EVERY,
    MAX_ROWS,
    SAMPLES,
    SampleTables,
    WandbSink,
    alert_of,
)
from tests import wandb_rows
from tests.microscope.samples import record
from tests.observability.test_wandb_images import write_samples
from tests.world.config import run_config

SUMMARY = Summary("completed", None, 1, 1.0, Path("run"))


class FakeRun:
    """The calls of wandb, and its settings."""

    def __init__(self, **arguments: Any) -> None:
        self.arguments = arguments
        self.rows: list[tuple[int, dict[str, float]]] = []
        self.summary: dict[str, Any] = {}

    def define_metric(self, *_: str, **__: str) -> None: ...
    def finish(self, exit_code: int) -> None: ...
    def alert(self, **_: str) -> None: ...

    def log(self, row: dict[str, float], step: int) -> None:
        self.rows.append((step, row))


@pytest.fixture
def opened(monkeypatch: pytest.MonkeyPatch) -> list[FakeRun]:
    import wandb

    runs: list[FakeRun] = []

    def init(**arguments: Any) -> FakeRun:
        runs.append(FakeRun(**arguments))
        return runs[-1]

    monkeypatch.setattr(wandb, "init", init)
    return runs


def config() -> RunConfig:
    return run_config(student={"model": "student"}, log={"console": "off", "wandb": "offline"})


def logged(run_dir: Path, *steps: int, resumed: bool = False) -> None:
    """A run that logs some steps and is killed."""
    sink = WandbSink(config(), run_dir, resumed)
    sink.start()
    for step in steps:
        sink.log(step, {"loss": float(step)})
    assert sink._writer.close(10)


def test_a_resumed_run_is_the_same_wandb_run(tmp_path: Path, opened: list[FakeRun]) -> None:
    logged(tmp_path, 1, 2, 3)
    logged(tmp_path, 2, 3, 4, resumed=True)
    first, second = (run.arguments for run in opened)
    assert (first["id"], second["resume"]) == (second["id"], "allow")
    assert [row["step"] for run in opened for _, row in run.rows] == [1, 2, 3, 4]
    logged(tmp_path, 1)  # another run in the same directory
    assert opened[2].arguments["id"] != first["id"]


def test_steps_after_a_rewind_come_once(tmp_path: Path, opened: list[FakeRun]) -> None:
    with RunLog(config(), tmp_path) as log:
        for step in (1, 2, 3):
            log.log(step, {"loss": 1.0})
        log.rewind({})
        for step in (2, 3, 4):
            log.log(step, {"loss": 1.0})
        log.finish("completed")
    assert [row["step"] for _, row in opened[0].rows] == [1, 2, 3, 4]


def test_a_cut_off_evaluation_comes_again(tmp_path: Path, opened: list[FakeRun]) -> None:
    logged(tmp_path, 1, 2)
    sink = WandbSink(config(), tmp_path, resumed=True)
    sink.start()
    for _ in range(2):
        sink.log(2, {"eval/sort/accuracy": 0.5})
    assert sink._writer.close(10)
    again = WandbSink(config(), tmp_path, resumed=True)
    again.start()
    again.log(2, {"eval/sort/accuracy": 0.5})
    assert again._writer.close(10)
    assert [len(run.rows) for run in opened] == [2, 2, 0]


def test_rows_of_one_step_all_come_and_in_any_order(tmp_path: Path, opened: list[FakeRun]) -> None:
    logged(tmp_path, 1, 2, 1, 2)
    assert [row["step"] for _, row in opened[0].rows] == [1, 2, 1, 2]


@given(lives=st.lists(st.lists(st.integers(0, 9), max_size=6), min_size=1, max_size=4))
def test_wandbs_own_step_only_grows_whatever_comes_again(
    tmp_path_factory: pytest.TempPathFactory, lives: list[list[int]]
) -> None:
    run_dir = tmp_path_factory.mktemp("run")
    rows: list[int] = []
    for number, steps in enumerate(lives):
        sink = WandbSink(config(), run_dir, resumed=number > 0)
        sink._run = FakeRun()  # type: ignore[assignment]
        for step in steps:
            sink.log(step, {})
        assert sink._writer.close(10)
        rows += [row for row, _ in sink._run.rows]  # type: ignore[union-attr]
    assert rows == list(range(len(rows)))


@pytest.mark.parametrize(
    "content", ["", "[]", '{"id": "../../x"}', '{"id": "0123abcd", "rows": -1}']
)
def test_a_damaged_file_begins_another_wandb_run(tmp_path: Path, content: str) -> None:
    (tmp_path / file_of("wandb")).write_text(content)
    assert LoggedRun.of(tmp_path, "wandb").rows == 0


@pytest.mark.slow
def test_offline_both_parts_have_one_id_for_wandb_sync_to_join(tmp_path: Path) -> None:
    for steps, resumed in (((1, 2), None), ((2, 3), {"loss": 1.0})):
        with RunLog(config(), tmp_path, before=resumed) as log:
            for step in steps:
                log.log(step, {"loss": 1.0})
            log.finish("interrupted")
        assert log.failures == 0
    files = list((tmp_path / "wandb").glob("offline-run-*/run-*.wandb"))
    assert {file.stem for file in files} == {f"run-{LoggedRun.of(tmp_path, 'wandb').id}"}


@pytest.mark.slow
def test_a_run_does_not_join_one_that_the_process_has_not_finished(tmp_path: Path) -> None:
    first, second = (WandbSink(config(), tmp_path / name) for name in ("first", "second"))
    assert (first.start(), second.start()) == (None, None)
    for sink in (second, first):
        sink.log(1, {"loss/total": 1.0})
        sink.close(SUMMARY)
    for name in ("first", "second"):
        assert list((tmp_path / name / "wandb").glob("offline-run-*/run-*.wandb"))


@pytest.mark.slow
def test_a_wandb_that_takes_nothing_holds_up_nobody(
    tmp_path: Path, opened: list[FakeRun], monkeypatch: pytest.MonkeyPatch
) -> None:
    taken = threading.Event()

    def log(self: FakeRun, *_: Any, **__: Any) -> None:
        taken.wait(60)

    ended: list[bool] = []
    monkeypatch.setattr(FakeRun, "log", log)
    monkeypatch.setattr(wandb_sink, "_end_service", lambda: ended.append(True))
    hasty = config()
    bounds = hasty.timeouts.model_copy(update={"shutdown_s": 1.0})
    sink = WandbSink(hasty.model_copy(update={"timeouts": bounds}), tmp_path)
    sink.start()
    for step in range(MAX_ROWS + 10):
        sink.log(step, {})
    assert sink.close(SUMMARY) == f"wandb did not take {MAX_ROWS} rows within 1 s"
    assert ended
    taken.set()


def test_a_run_of_the_users_in_this_process_is_not_ended_where_no_server_answers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import wandb

    def no_server(**_: Any) -> Any:
        raise wandb.errors.CommError("timed out")

    monkeypatch.setattr(wandb, "init", no_server)
    monkeypatch.setattr(wandb, "run", object())
    monkeypatch.setattr(wandb, "teardown", lambda: pytest.fail("it has ended the user's run"))
    online = config().log.model_copy(update={"wandb": "online"})
    with pytest.raises(wandb.errors.CommError):
        WandbSink(config().model_copy(update={"log": online}), tmp_path).start()


def test_what_wandb_makes_of_a_row_is_raised_once(
    tmp_path: Path, opened: list[FakeRun], monkeypatch: pytest.MonkeyPatch
) -> None:
    def log(self: FakeRun, *_: Any, **__: Any) -> None:
        raise ConnectionError("gone")

    sink = WandbSink(config(), tmp_path)
    sink.start()
    with monkeypatch.context() as patch:
        patch.setattr(FakeRun, "log", log)
        sink._give([(0, {})])
    with pytest.raises(ConnectionError, match="gone"):
        sink.log(1, {})
    sink.log(2, {})
    assert sink.close(SUMMARY) is None


def test_without_its_table_an_evaluation_has_metrics(tmp_path: Path, opened: list[FakeRun]) -> None:
    (tmp_path / "evals").mkdir()
    (tmp_path / "evals" / "step_2.jsonl").write_text("no JSON\n")
    sink = WandbSink(config(), tmp_path)
    sink.start()
    sink.log(2, {"eval/sort/accuracy": 0.5})
    with pytest.raises(ValueError, match="Expecting value"):
        sink.close(SUMMARY)
    assert [row["eval/sort/accuracy"] for _, row in opened[0].rows] == [0.5]


@pytest.mark.slow
def test_an_alert_comes_though_as_many_rows_wait_as_may(
    tmp_path: Path, opened: list[FakeRun], monkeypatch: pytest.MonkeyPatch
) -> None:
    free, alerts = threading.Event(), list[str]()
    monkeypatch.setattr(FakeRun, "log", lambda self, *_, **__: free.wait(60))
    monkeypatch.setattr(FakeRun, "alert", lambda self, text, **_: alerts.append(text))
    sink = WandbSink(config(), tmp_path)
    sink.start()
    for step in range(MAX_ROWS + 10):
        sink.log(step, {})
    sink.message("failed: rollouter: its process died")
    free.set()
    assert sink.close(SUMMARY) == "wandb lacks 10 rows or alerts: it was behind"
    assert alerts == ["failed: rollouter: its process died"]


@pytest.mark.slow
def test_an_offline_run_read_back_has_keys_axes_config_tables_pictures_and_alerts(
    tmp_path: Path,
) -> None:
    write_samples(tmp_path, score=0.5, versions=[[0, 0, 2]])
    with RunLog(config(), tmp_path) as log:
        log.log(1, {"loss/total": 2.5, "sync/version": 0.0})
        log.log(2, {"eval/sort/accuracy": 0.5})
        log.message("90% of the responses are cut off at rollout.max_tokens (guardrail: 0.5)")
        log.message("student/0 is ejected: its process has ended")
        log.message("everything is up after 3 s")
        log.finish("failed", "rollouter: its process died")
    assert log.failures == 0, (tmp_path / "run.log").read_text()
    import wandb  # here: ruff sorts it above by whether a folder wandb/ stands beside the tests

    wandb.teardown()  # its process has written all of the file when it has ended
    (path,) = (tmp_path / "wandb").glob("offline-run-*/run-*.wandb")
    step, evaluation = wandb_rows.rows(path)
    assert (step["loss/total"], step["step"], step["sync/version"]) == (2.5, 1, 0)
    assert (evaluation["eval/sort/accuracy"], evaluation["evaluation/step"]) == (0.5, 2)
    assert evaluation["evaluation/samples/_type"] == "table-file"
    assert (evaluation["evaluation/samples/nrows"], step["generations/samples/nrows"]) == (3, 1)
    files = {k: v for one in wandb_rows.table_files(path).values() for k, v in one.items()}
    table = json.loads(files["evaluation/samples.table.json"].read_text())
    assert table["columns"] == ["uid", "response", "score", "versions", "image 1", "image 2"]
    assert [row[:4] for row in table["data"]] == [
        [uid, "1 2", "0.5", "[[0, 0, 2]]"] for uid in ("p0", "p1", "p2")
    ]
    assert [row[5] for row in table["data"]] == [None] * 3
    first, second, third = (row[4] for row in table["data"])
    assert third is None
    for cell in (first, second):
        assert (cell["_type"], cell["width"], cell["height"]) == ("image-file", 8, 4)
        shown = Image.open(BytesIO(files[cell["path"]].read_bytes()))
        assert shown.convert("RGB").getpixel((0, 0)) == (255, 0, 0)
    table = json.loads(files["generations/samples.table.json"].read_text())
    (generation,) = table["data"]
    of = dict(zip(table["columns"], generation, strict=True))
    assert (of["uid"], of["response"], of["versions"]) == ("p7/1", "hii", "[0]")
    assert of["image"]["_type"] == "image-file"
    assert wandb_rows.axes(path) == dict(AXES)
    given = wandb_rows.config(path)
    assert given["student"]["model"] == "student"
    assert given["environment"]["versions"]["torch"]
    assert given["environment"]["devices"]
    titles = [title for title, _ in wandb_rows.alerts(path)]
    assert titles == ["guardrail", "a replica failed", "the run has failed"]


HANGS = """
import sys
from contextlib import suppress
from pathlib import Path
import psutil
from async_opd.observability.wandb_sink import WandbSink
from tests.observability.test_wandb_sink import SUMMARY, config
hasty = config()
bounds = hasty.timeouts.model_copy(update={"shutdown_s": 1.0})
sink = WandbSink(hasty.model_copy(update={"timeouts": bounds}), Path(sys.argv[1]))
sink.start()
for process in psutil.Process().children(recursive=True):
    with suppress(psutil.NoSuchProcess):  # one that was there for a moment only
        process.suspend()
for step in range(1, 2000):
    sink.log(step, {f"a{number}": 1.0 for number in range(300)})
assert "did not take" in (sink.close(SUMMARY) or "")
Path(sys.argv[1], "closed").touch()
"""


@pytest.mark.slow
def test_a_process_whose_wandb_hangs_comes_to_its_end(tmp_path: Path) -> None:
    command = [sys.executable, "-c", HANGS, str(tmp_path)]
    said = tmp_path / "said"  # a pipe would be held open by what was stopped
    own = {k: v for k, v in os.environ.items() if k != "WANDB_SERVICE"}  # that of another process
    with said.open("w") as file:
        done = subprocess.run(command, stdout=file, stderr=file, env=own, timeout=60, check=False)
    assert done.returncode == 0, said.read_text()
    assert (tmp_path / "closed").exists()


@pytest.mark.parametrize(
    ("text", "title"),
    [
        ("step 7: 90% of the responses are cut off (guardrail: 0.5)", "guardrail"),
        ("rollback 1 of at most 3", "guardrail"),
        ("student/0 is ejected: its process died", "a replica failed"),
        ("teacher a/1 is gone for good: it died again", "a replica failed"),
        ("failed: rollouter: its process died", "the run has failed"),
        ("completed", None),
        ("everything is up after 3 s", None),
        ("interrupted", None),
        ("wandb failed: a timeout (the run ", None),
        ("teacher a/1 is being rebuilt", None),
        ("teacher a/1 is rebuilt", None),
        ("trainer: see below\n  failed: something", None),  # a quoted line of an engine
    ],
)
def test_a_message_that_somebody_should_act_upon_is_an_alert(text: str, title: str | None) -> None:
    found = alert_of(text)
    assert (found and (found.title, found.text)) == (title and (title, text))


@pytest.fixture
def writer(tmp_path: Path) -> RecordWriter:
    return RecordWriter(tmp_path / MICROSCOPE, 0, 1 << 24)


def test_generations_are_those_of_the_newest_recorded_step(
    tmp_path: Path, writer: RecordWriter
) -> None:
    assert SampleTables(tmp_path).generations(100) is None  # without records
    for step in (3, 5, 9):
        writer.write(step, [record(f"p{step}/0", step=step)])
    found = SampleTables(tmp_path).generations(8)
    assert found is not None
    assert [row[found.columns.index("uid")] for row in found.rows] == ["p5/0"]


def test_generations_come_once_in_so_many_steps(tmp_path: Path, writer: RecordWriter) -> None:
    tables, came = SampleTables(tmp_path), []
    for step in range(1, 2 * EVERY + 2):
        writer.write(step, [record(step=step)])
        if tables.generations(step) is not None:
            came.append(step)
    assert came == [1, 1 + EVERY, 1 + 2 * EVERY]


def test_a_table_has_at_most_so_many_rows(tmp_path: Path, writer: RecordWriter) -> None:
    writer.write(1, [record(f"p{i}/0") for i in range(SAMPLES + 8)])
    found = SampleTables(tmp_path).generations(1)
    assert found is not None
    assert len(found.rows) == SAMPLES
