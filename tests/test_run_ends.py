"""How a run ends when it is interrupted at an awkward moment."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import threading
from collections.abc import Coroutine
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from async_opd import job
from async_opd import run as module
from async_opd.checkpoint import mirror as mirror_module
from async_opd.checkpoint.earlier_run import RUN_OUTPUTS, is_completed
from async_opd.checkpoint.mirror import Mirror
from async_opd.checkpoint.resume import IDENTITY, identity
from async_opd.checkpoint.run_copies import END, RunCopies
from async_opd.checkpoint.store import Checkpoints
from async_opd.checks.preflight import Inputs
from async_opd.config.load import dump_config
from async_opd.config.run_config import RunConfig
from async_opd.core.errors import ConfigError, Problem, StageError
from async_opd.files.origin import read_origins
from async_opd.files.run_format import (
    FORMAT_FILE,
    RUN_FORMAT,
    refuse_other_formats,
    write_run_format,
)
from async_opd.job import Job
from async_opd.observability import run_log as runlog
from async_opd.observability.live.live_file import LIVE_FILE, LiveRun, read_live
from async_opd.prepare import Prepared
from async_opd.processes.run_lock import run_lock
from async_opd.run import BAD_INPUT, INTERRUPTED, run
from tests.checkpoint.test_store import ROWS, cut
from tests.observability.test_run_log import Recorder
from tests.world.config import run_config as config
from tests.world.training import FakeTraining, SavingTrainer


def ready(made: RunConfig) -> Prepared:
    return Prepared(made, Inputs(ROWS), "cpu")


def kept(run_dir: Path, config_text: str) -> None:
    write_run_format(run_dir)
    store = Checkpoints(run_dir / "checkpoints", 2)
    store.commit(store.begin(4), cut(4), config_text, {})


@pytest.mark.parametrize(
    "left",
    [
        "checkpoints/step_4/cut.json",
        *("summary.json", "metrics.jsonl", "ledger.jsonl", "run.log", "dead_letters.jsonl"),
    ],
)
def test_a_run_directory_with_an_earlier_run_is_not_used_for_another_run(
    tmp_path: Path, left: str
) -> None:
    (tmp_path / left).parent.mkdir(parents=True, exist_ok=True)
    (tmp_path / left).write_text("{}")
    name = left.partition("/")[0]
    with pytest.raises(ConfigError, match=f"holds an earlier run: {name}"):
        run(ready(config(run_dir=str(tmp_path))))
    assert (tmp_path / left).read_text() == "{}"


def complete(run_dir: Path) -> None:
    """Leaves what a completed run leaves, without its format."""
    (run_dir / "model").mkdir(parents=True)
    (run_dir / "summary.json").write_text('{"status": "completed"}')


@pytest.mark.slow
def test_a_resumed_run_that_is_killed_is_not_completed_by_the_summary_of_the_one_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_run_format(tmp_path)
    (tmp_path / "summary.json").write_text('{"status": "completed"}')  # and no model

    def killed(main: Coroutine[Any, Any, int], new_loop: object) -> int:
        main.close()
        (tmp_path / "model").mkdir()
        raise KeyboardInterrupt

    monkeypatch.setattr(module, "run_to_end", killed)
    monkeypatch.setattr(runlog.RunLog, "finish", lambda log, status, error=None: status)
    unlogged = config(run_dir=str(tmp_path), log={"wandb": "off"})  # nothing would finish the run
    with pytest.raises(KeyboardInterrupt):
        run(ready(unlogged), resume=True)
    assert not is_completed(tmp_path)


def test_two_runs_do_not_share_a_run_directory(tmp_path: Path) -> None:
    for resume in (False, True):
        with run_lock(tmp_path), pytest.raises(ConfigError, match="another process runs in"):
            run(ready(config(run_dir=str(tmp_path))), resume)


def test_another_config_is_refused_with_its_keys(tmp_path: Path) -> None:
    kept(tmp_path, identity(config(), ROWS))
    other = config(run_dir=str(tmp_path), train={"batch_size": 64}, seed=3)
    with pytest.raises(ConfigError) as caught:
        run(ready(other), resume=True)
    assert [problem.key for problem in caught.value.problems] == ["seed", "train.batch_size"]


def test_a_completed_run_of_another_config_is_refused_with_its_keys(tmp_path: Path) -> None:
    kept(tmp_path, identity(config(), ROWS))
    complete(tmp_path)
    longer = config(run_dir=str(tmp_path), train={"steps": 4321})
    with pytest.raises(ConfigError) as caught:
        run(ready(longer), resume=True)
    assert [problem.key for problem in caught.value.problems] == ["train.steps"]


NO_FORMAT = f"found no format version.* expected {RUN_FORMAT}"


@pytest.mark.parametrize("left", [*RUN_OUTPUTS, "checkpoints/step_4"])
def test_an_older_run_is_not_resumed(tmp_path: Path, left: str) -> None:
    (tmp_path / left).mkdir(parents=True)
    with pytest.raises(ConfigError, match=NO_FORMAT):
        run(ready(config(run_dir=str(tmp_path))), resume=True)


def test_neither_a_newer_run_nor_a_completed_one_of_another_format_is_resumed(
    tmp_path: Path,
) -> None:
    complete(tmp_path / "completed")
    (tmp_path / FORMAT_FILE).write_text(json.dumps({"run_format": RUN_FORMAT + 1}))
    newer = f"found {RUN_FORMAT + 1}, expected {RUN_FORMAT}"
    for folder, cause in ((tmp_path / "completed", NO_FORMAT), (tmp_path, newer)):
        with pytest.raises(ConfigError, match=cause):
            run(ready(config(run_dir=str(folder))), resume=True)


@pytest.mark.parametrize("resume", [False, True])
def test_a_run_that_begins_writes_its_format_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, resume: bool
) -> None:
    def full(path: Path, text: str) -> None:
        raise OSError("the disk is full")

    monkeypatch.setattr(job, "write_atomically", full)  # the config, which comes next
    with pytest.raises(OSError, match="the disk is full"):
        run(ready(config(run_dir=str(tmp_path))), resume)
    assert [path.name for path in tmp_path.iterdir()] == [FORMAT_FILE]
    refuse_other_formats(tmp_path)


def test_a_completed_run_is_left_alone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_run_format(tmp_path)
    complete(tmp_path)
    (tmp_path / IDENTITY).write_text(identity(config(), ROWS))
    assert run(ready(config(run_dir=str(tmp_path))), resume=True) == 0
    assert "is completed already" in capsys.readouterr().out


@pytest.mark.parametrize("link", [False, True])
def test_a_completed_run_that_may_be_another_one_is_refused(tmp_path: Path, link: bool) -> None:
    write_run_format(tmp_path)
    complete(tmp_path)
    if link:
        (tmp_path / IDENTITY).symlink_to("/no/such")
    with pytest.raises(ConfigError, match=r"identity\.json"):
        run(ready(config(run_dir=str(tmp_path))), resume=True)


def mirrored(run_dir: Path, url: str) -> RunConfig:
    return config(run_dir=str(run_dir), checkpoint={"mirror": url}, log={"wandb": "off"})


def test_a_run_goes_on_in_an_empty_directory_from_its_mirror(
    tmp_path: Path, distilling: type[FakeTraining], monkeypatch: pytest.MonkeyPatch
) -> None:
    url = f"file://{tmp_path}/bucket"
    before = mirrored(tmp_path / "first", url)
    (tmp_path / "first").mkdir()
    kept(tmp_path / "first", identity(before, ROWS))
    Mirror(Checkpoints(tmp_path / "first/checkpoints", 2), RunCopies.at(url), 20, 20)._sync(False)
    begun = started(distilling, asyncio.CancelledError())
    monkeypatch.setattr(mirror_module, "state_s", lambda config: 20)
    assert run(ready(mirrored(tmp_path / "second", url)), resume=True) == INTERRUPTED
    assert begun[0].start is not None
    assert begun[0].start.folder == tmp_path / "second/checkpoints/step_4"
    assert "step 4 is taken from" in (tmp_path / "second/run.log").read_text()
    end = RunCopies.at(url).complete(END)
    assert "summary.json" in end.files
    with pytest.raises(ConfigError, match=r"checkpoint.mirror: .* holds an earlier run"):
        run(ready(mirrored(tmp_path / "third", url)))


def test_a_run_that_completed_elsewhere_has_the_config_of_its_user_here(tmp_path: Path) -> None:
    url = f"file://{tmp_path}/bucket"
    first, second = (mirrored(tmp_path / name, url) for name in ("first", "second"))
    complete(tmp_path / "first")
    (tmp_path / "first/model/config.json").write_text("{}")
    (tmp_path / "first/identity.json").write_text(identity(first, ROWS))
    (tmp_path / "first/config.yaml").write_text("eval: {grader: model/g.py:f}")
    write_run_format(tmp_path / "first")
    store = Checkpoints(tmp_path / "first/checkpoints", 2)
    Mirror(store, RunCopies.at(url), 20, 20)._sync(True)
    assert run(ready(second), resume=True) == 0
    assert (tmp_path / "second/config.yaml").read_text() == dump_config(second)
    assert (tmp_path / "second/identity.json").read_text() == identity(second, ROWS)
    refuse_other_formats(tmp_path / "second")


def quiet(run_dir: Path) -> RunConfig:
    return config(run_dir=str(run_dir), log={"wandb": "off"})


def started(training: type[FakeTraining], error: BaseException | None = None) -> list[Job]:
    """The jobs of the runs that begin from now on, which end with this error."""
    jobs: list[Job] = []

    async def begins(made: FakeTraining) -> None:
        jobs.append(made.job)
        if error is not None:
            raise error

    training.run = begins  # type: ignore[method-assign]
    return jobs


def test_a_run_directory_with_an_empty_folder_for_checkpoints_is_taken(
    tmp_path: Path, distilling: type[FakeTraining]
) -> None:
    (tmp_path / "checkpoints").mkdir()
    assert run(ready(quiet(tmp_path))) == 0


@pytest.mark.parametrize("has_one", [True, False])
def test_a_resumed_run_starts_at_its_newest_checkpoint_or_from_the_beginning_and_logs_it(
    tmp_path: Path, distilling: type[FakeTraining], has_one: bool
) -> None:
    jobs = started(distilling)
    write_run_format(tmp_path)
    if has_one:
        kept(tmp_path, identity(quiet(tmp_path), ROWS))
    assert run(ready(quiet(tmp_path)), resume=True) == 0
    start = jobs[0].start
    line = "going on after step 4, weight version 1"
    assert (start and start.cut.step) == (4 if has_one else None)
    log = (tmp_path / "run.log").read_text()
    assert (line if has_one else "the run starts from the beginning") in log


def test_a_signal_during_the_final_save_waits_for_the_model(
    tmp_path: Path, distilling: type[FakeTraining]
) -> None:
    class Signalled(SavingTrainer):
        async def save(self, directory: str) -> None:
            os.kill(os.getpid(), signal.SIGTERM)
            await asyncio.sleep(0.05)
            await super().save(directory)

    distilling.trainer = Signalled()
    assert run(ready(quiet(tmp_path))) == INTERRUPTED
    assert (tmp_path / "model").is_dir()


def test_what_a_resumed_run_reads_is_read_beside_the_event_loop(
    tmp_path: Path, distilling: type[FakeTraining], monkeypatch: pytest.MonkeyPatch
) -> None:
    threads: list[threading.Thread] = []
    made = distilling.__init__

    def init(training: FakeTraining, *args: Any) -> None:
        threads.append(threading.current_thread())
        made(training, *args)

    monkeypatch.setattr(distilling, "__init__", init)
    assert run(ready(quiet(tmp_path))) == 0
    assert threads != [threading.main_thread()]


def test_a_trace_that_cannot_be_written_costs_neither_the_model_nor_the_exit_code(
    tmp_path: Path, distilling: type[FakeTraining]
) -> None:
    (tmp_path / "trace.json").mkdir()
    assert run(ready(quiet(tmp_path))) == 0
    assert (tmp_path / "model").is_dir()
    assert "trace failed: IsADirectoryError" in (tmp_path / "run.log").read_text()


def test_a_trace_that_cannot_be_written_hides_no_other_error(
    tmp_path: Path, distilling: type[FakeTraining]
) -> None:
    (tmp_path / "trace.json").mkdir()
    distilling.error = ConfigError([Problem("config.yaml", "loss", "it is wrong")])
    assert run(ready(quiet(tmp_path))) == BAD_INPUT


@pytest.mark.parametrize("call", ["start", "log", "busy", "message", "close"])
def test_a_console_that_fails_costs_neither_the_model_nor_the_exit_code(
    tmp_path: Path,
    distilling: type[FakeTraining],
    monkeypatch: pytest.MonkeyPatch,
    call: str,
) -> None:
    console = Recorder("console", fails=(call,))
    monkeypatch.setattr("async_opd.job.open_console", lambda *_: console)
    assert run(ready(quiet(tmp_path))) == 0
    assert (tmp_path / "model").is_dir()


def test_the_model_of_a_failed_run_is_kept_when_all_is_trained_and_the_trainer_has_it(
    tmp_path: Path, distilling: type[FakeTraining]
) -> None:
    distilling.error = StageError("evaluation", "nothing can be graded")
    assert run(ready(quiet(tmp_path))) == 1
    assert (tmp_path / "model").is_dir()
    distilling.trained = False
    assert run(ready(quiet(tmp_path / "half"))) == 1
    assert not (tmp_path / "half" / "model").exists()
    distilling.trained, distilling.has_weights = True, False  # the trainer is being restarted
    assert run(ready(quiet(tmp_path / "other"))) == 1
    assert not (tmp_path / "other" / "model").exists()


@pytest.mark.parametrize("has_weights", [True, False])
def test_an_interrupted_run_saves_the_student_only_if_the_trainer_has_its_weights(
    tmp_path: Path, distilling: type[FakeTraining], has_weights: bool
) -> None:
    distilling.error = asyncio.CancelledError()
    distilling.has_weights = has_weights
    assert run(ready(quiet(tmp_path))) == INTERRUPTED
    assert (tmp_path / "model").is_dir() == has_weights
    told = "the student is not saved: the trainer has not its weights again yet"
    assert (told in (tmp_path / "run.log").read_text()) != has_weights


def test_a_checkpoint_that_cannot_be_had_at_the_end_does_not_replace_the_error(
    tmp_path: Path, distilling: type[FakeTraining]
) -> None:
    distilling.error = StageError("teacher", "it is gone")
    run(ready(quiet(tmp_path)))
    log = (tmp_path / "run.log").read_text()
    assert "no checkpoint at the end, --resume takes the one before: no checkpoint of this" in log
    assert "failed: teacher: it is gone" in log


def test_a_run_that_begins_writes_how_it_was_started(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object, **__: object) -> None:
        raise OSError("the disk is full")

    monkeypatch.setattr(job, "RunLog", full)  # it comes next
    monkeypatch.setattr("sys.argv", ["async_opd", "run", "config.yaml"])
    with pytest.raises(OSError, match="full"):
        run(ready(config(run_dir=str(tmp_path))))
    assert [origin.command for origin in read_origins(tmp_path)] == ["async_opd run config.yaml"]


def test_an_interrupted_run_says_in_its_log_how_to_continue_it(
    tmp_path: Path, distilling: type[FakeTraining]
) -> None:
    distilling.error = asyncio.CancelledError()
    assert run(ready(quiet(tmp_path))) == INTERRUPTED
    command = f"async_opd run {tmp_path}/config.yaml --run-dir {tmp_path} --resume"
    log = (tmp_path / "run.log").read_text()
    assert f"interrupted: a signal ended the run\n    → continue it: {command}\n" in log


def ended(run_dir: Path) -> float:
    return float(json.loads((run_dir / "summary.json").read_text())["seconds"])


def test_the_time_of_a_resumed_run_is_that_of_all_its_parts(
    tmp_path: Path, distilling: type[FakeTraining]
) -> None:
    distilling.error = asyncio.CancelledError()
    assert run(ready(quiet(tmp_path))) == INTERRUPTED
    summary = json.loads((tmp_path / "summary.json").read_text())
    (tmp_path / "summary.json").write_text(json.dumps(summary | {"seconds": 1000.0}))
    (tmp_path / "model").rmdir()
    distilling.error = None
    assert run(ready(quiet(tmp_path)), resume=True) == 0
    assert 1000 < ended(tmp_path) < 1900


def test_the_time_of_a_part_that_was_killed_ends_with_its_last_sign_of_life(
    tmp_path: Path, distilling: type[FakeTraining]
) -> None:
    write_run_format(tmp_path)
    killed = LiveRun(1, "elsewhere", 1, started=50.0, time=250.0, earlier_s=1000.0)
    (tmp_path / LIVE_FILE).write_text(json.dumps(asdict(killed)))
    assert run(ready(quiet(tmp_path)), resume=True) == 0
    assert 1200 < ended(tmp_path) < 1900


def test_the_live_file_and_the_console_count_the_parts_before(
    tmp_path: Path, distilling: type[FakeTraining], capsys: pytest.CaptureFixture[str]
) -> None:
    write_run_format(tmp_path)
    (tmp_path / "summary.json").write_text('{"status": "interrupted", "seconds": 7200}')
    found: list[LiveRun | None] = []

    async def looks(training: FakeTraining) -> None:
        found.append(read_live(tmp_path))
        training.job.log.log(1, {"loss/total": 0.5})

    distilling.run = looks  # type: ignore[method-assign]
    assert run(ready(quiet(tmp_path)), resume=True) == 0
    assert [live and live.earlier_s for live in found] == [7200]
    assert "2:00:0" in capsys.readouterr().out.partition(" elapsed")[0]
