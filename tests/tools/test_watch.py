"""``async_opd watch``: a run seen from another terminal, whatever becomes of it."""

from __future__ import annotations

import io
import json
import tempfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from weakref import ReferenceType, ref

import pytest
from hypothesis import given
from hypothesis import strategies as st

from async_opd import cli
from async_opd.config.load import dump_config
from async_opd.core.errors import ConfigError
from async_opd.files.lines import MetricsRow
from async_opd.files.run_format import write_run_format
from async_opd.observability.live.live_file import LIVE_FILE, LiveFile
from async_opd.observability.run_log import RunLog
from async_opd.observability.sinks import Status
from async_opd.tools import watch as followed_run
from async_opd.tools.watch import ENDED, GONE, LOOK_S, FollowedLines, FollowedRun, News, Watch
from tests.observability.live.test_console import METRICS, Clock, Terminal, config, row, summary
from tests.test_resume import SHAPE, live_and_evaluate, world


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def out() -> io.StringIO:
    return io.StringIO()


class Run:
    """The files of a run, written by what writes them in a run."""

    def __init__(self, folder: Path, clock: Clock) -> None:
        self.folder, self.clock = folder, clock
        write_run_format(folder)
        (folder / "config.yaml").write_text(dump_config(config()))
        self.live = LiveFile(folder, clock)
        self.log = RunLog(config(), folder, clock, [], viewers=[self.live]).__enter__()

    def step(self, step: int) -> None:
        self.clock.now += 10
        self.log.log(step, METRICS | {"loss/total": 1 / step})
        self.log.waits({"train": "scored samples"})
        self.live.beat()

    def die(self) -> None:
        """Leaves what a kill leaves: the live file of a process that has gone."""
        self.live._ended.set()
        self.live._thread.join()
        self.live._run = replace(self.live._run, born=1)
        self.live.beat()


@pytest.fixture
def run(tmp_path: Path, clock: Clock) -> Run:
    return Run(tmp_path, clock)


def watching(run: Run, out: io.StringIO, *then: Callable[[], object]) -> Watch:
    """A view that looks once before each of the events, and once a second of the run after."""
    events = list(then)

    def sleep(seconds: float) -> None:
        run.clock.now += seconds
        if events:
            events.pop(0)()

    return Watch(run.folder, out, run.clock, sleep)


def test_a_finished_run_of_the_pipeline_shows_its_final_state(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    assert live_and_evaluate(tmp_path, 1, SHAPE, None)
    (tmp_path / "config.yaml").write_text(dump_config(world(**SHAPE).pipeline.config))
    write_run_format(tmp_path)
    before = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")}
    assert cli.main(["watch", str(tmp_path)]) == ENDED
    text = capsys.readouterr().out
    assert row(text, "step")[:2] == ["step", "6/6"]
    assert "100.0%" in text
    assert "status    failed, 6 steps" in text  # these lives end without RunLog.finish
    assert before == {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")}


def test_a_run_that_ended_has_the_time_that_it_took(run: Run, out: io.StringIO) -> None:
    for step in (1, 2, 3):
        run.step(step)
    run.log.finish("interrupted", "a signal ended the run")
    run.clock.now += 9999
    assert watching(run, out).run(0) == ENDED
    assert "0:00:30 elapsed" in out.getvalue()
    assert "interrupted, 3 steps" in out.getvalue()


@pytest.mark.parametrize("status", ["interrupted", "completed"])
def test_no_next_command_takes_the_config_of_a_directory_that_may_be_somebody_elses(
    run: Run, out: io.StringIO, status: Status
) -> None:
    run.log.log(1, {"eval/sort/accuracy": 1.0})
    run.log.finish(status)
    assert watching(run, out).run(0) == ENDED
    assert "config.yaml" not in out.getvalue()
    assert ("async_opd report" in out.getvalue()) == (status == "completed")


def test_a_run_that_ended_has_the_means_of_its_steps_and_not_the_last_one(
    run: Run, out: io.StringIO
) -> None:
    for step in (1, 2, 3):
        run.step(step)
    drained = {"rollout/tokens_per_s": 0.0, "rollout/busy": 0.0}
    run.log.log(4, drained)
    run.log.finish("completed")
    watching(run, out).run(0)
    assert row(out.getvalue(), "pool")[:5] == ["pool", "mean", "busy", "mean", "t/s"]
    words = row(out.getvalue(), "rollout")
    assert ("73%" in words, "9259" in words) == (True, True), words


def test_a_run_that_was_killed_has_the_time_until_its_last_sign_of_life(
    run: Run, out: io.StringIO
) -> None:
    for step in (1, 2, 3):
        run.step(step)
    run.die()
    run.clock.now += 9999
    assert watching(run, out).run(0) == GONE
    assert "failed, 3 steps in 0:00:30" in out.getvalue()


def test_a_long_past_is_read_in_pieces_and_not_kept(
    run: Run, out: io.StringIO, monkeypatch: pytest.MonkeyPatch
) -> None:
    for step in range(1, 41):
        run.step(step)
    run.log.finish("completed")
    monkeypatch.setattr(followed_run, "READ_BYTES", 2000)  # two or three rows
    rows: list[ReferenceType[MetricsRow]] = []
    most = 0
    look = FollowedRun.look

    def counted(self: FollowedRun) -> News:
        nonlocal most
        news = look(self)
        rows.extend(ref(one) for one in news.rows)
        most = max(most, sum(one() is not None for one in rows))
        return news

    monkeypatch.setattr(FollowedRun, "look", counted)
    assert watching(run, out).run(0) == ENDED
    assert len(rows) == 40
    assert most <= 6
    assert "0:06:40 elapsed" in out.getvalue()


def test_a_running_run_is_followed_until_it_ends(run: Run, out: io.StringIO) -> None:
    run.step(1)
    view = watching(
        run,
        out,
        lambda: run.step(2),
        lambda: run.log.message("rollout/replica/0 is ejected: no heartbeat"),
        lambda: run.step(100),
        lambda: run.log.finish("completed"),
    )
    assert view.run(0) == ENDED
    text = out.getvalue()
    assert "step 2/100" in text
    assert "step 100/100" in text
    assert "rollout/replica/0 is ejected" in text
    assert "status    completed, 100 steps" in text


def test_what_pools_wait_for_comes_from_the_live_file(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TERM", "xterm")
    run.step(1)
    out = Terminal()
    assert watching(run, out, lambda: run.log.finish("completed")).run(0) == ENDED
    assert "scored samples" in out.getvalue()


def test_a_run_that_goes_back_to_a_checkpoint_is_shown_from_there(
    run: Run, out: io.StringIO
) -> None:
    for step in range(1, 9):
        run.step(step)

    def back() -> None:
        kept = (run.folder / "metrics.jsonl").read_text().splitlines(keepends=True)[:4]
        (run.folder / "metrics.jsonl").write_text("".join(kept))
        run.log.rewind({})

    view = watching(run, out, back, lambda: run.step(5), lambda: run.log.finish("completed"))
    view.run(0)
    assert [line.split()[1] for line in out.getvalue().splitlines() if line[:5] == "step "][
        -1
    ] == "5/100"


def test_a_run_whose_process_is_gone_is_reported_with_how_to_go_on(
    run: Run, out: io.StringIO
) -> None:
    run.step(1)
    run.die()
    assert watching(run, out).run(0) == GONE
    assert f"its process {run.live._run.pid}" in out.getvalue()
    assert "is gone" in out.getvalue()
    command = f"async_opd run {run.folder}/config.yaml --run-dir {run.folder} --resume"
    assert f"continue  {command}" in out.getvalue()


def test_a_process_of_another_machine_is_gone_after_a_minute_without_a_sign_of_life(
    run: Run, out: io.StringIO
) -> None:
    run.step(1)
    run.die()
    run.live._run = replace(run.live._run, host="elsewhere")
    run.live.beat()
    before = run.clock.now
    assert watching(run, out).run(0) == GONE
    assert 60 <= run.clock.now - before <= 61


def test_a_run_of_which_only_the_config_is_there_is_given_time_to_begin(
    tmp_path: Path, clock: Clock, out: io.StringIO
) -> None:
    write_run_format(tmp_path)
    (tmp_path / "config.yaml").write_text(dump_config(config()))
    begun: list[Run] = []

    def sleep(seconds: float) -> None:
        clock.now += seconds
        if not begun:
            begun.append(Run(tmp_path, clock))
        else:
            begun[0].log.finish("completed")

    assert Watch(tmp_path, out, clock, sleep).run(0) == ENDED


def test_a_run_that_is_not_there_yet_is_waited_for(
    tmp_path: Path, clock: Clock, out: io.StringIO, capsys: pytest.CaptureFixture[str]
) -> None:
    folder, due = tmp_path / "later", clock.now + 7

    def sleep(seconds: float) -> None:
        clock.now += seconds
        if clock.now >= due and not folder.exists():
            folder.mkdir()
            Run(folder, clock).log.finish("completed")

    assert Watch(folder, out, clock, sleep).run(60) == ENDED
    assert "waiting for a run in" in capsys.readouterr().out


def test_a_typo_is_named_while_a_run_is_waited_for(
    tmp_path: Path, clock: Clock, capsys: pytest.CaptureFixture[str]
) -> None:
    def sleep(seconds: float) -> None:
        clock.now += seconds

    (tmp_path / "quickstart").mkdir()
    with pytest.raises(ConfigError):
        Watch(tmp_path / "quikstart", None, clock, sleep).run(1)
    assert f"(did you mean {tmp_path}/quickstart?)" in capsys.readouterr().out


def test_a_run_that_never_comes_is_an_error_after_the_wait(tmp_path: Path, clock: Clock) -> None:
    def sleep(seconds: float) -> None:
        clock.now += seconds

    begun = clock.now
    with pytest.raises(ConfigError, match="holds no run"):
        Watch(tmp_path, None, clock, sleep).run(5)
    assert clock.now - begun == pytest.approx(5, abs=LOOK_S)


def test_a_run_that_was_resumed_is_shown_with_its_earlier_steps(run: Run, out: io.StringIO) -> None:
    run.step(1)
    run.log.finish("interrupted")
    (run.folder / "summary.json").unlink()
    again = Run(run.folder, run.clock)
    again.step(2)
    assert watching(again, out, lambda: again.log.finish("completed")).run(0) == ENDED
    assert "step 2/100" in out.getvalue()
    rows = (run.folder / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in rows] == [1, 2]


def test_control_characters_of_the_files_command_nothing(run: Run, out: io.StringIO) -> None:
    run.step(1)
    with (run.folder / "run.log").open("a") as log:
        log.write("2026-11-22T01:02:03 \x1b[2Jcleared\n")
    with (run.folder / "metrics.jsonl").open("a") as metrics:
        metrics.write(json.dumps({"step": 2, "eval/\x1b]0;t\x07/accuracy": 1.0}) + "\n")
    run.log._status = "completed"
    run.live.close(summary())
    (run.folder / "summary.json").write_text('{"status": "completed", "seconds": 1, "steps": 2}')
    watching(run, out).run(0)
    assert "\x1b" not in out.getvalue()
    assert not (run.folder / LIVE_FILE).exists()


def test_a_run_of_an_older_version_is_shown(
    run: Run, out: io.StringIO, capsys: pytest.CaptureFixture[str]
) -> None:
    run.step(1)
    run.log.finish("completed")
    with (run.folder / "config.yaml").open("a") as file:
        file.write("older: 1\n")
    assert watching(run, out).run(0) == ENDED
    assert "older: unknown key (value 1)" in capsys.readouterr().err


def test_further_arguments_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        cli.main(["watch", "a", "b"])
    assert "unrecognized arguments: b" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["mine.yaml", "runs"])
def test_a_file_and_the_folder_of_all_runs_are_refused_at_once(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "mine.yaml").write_text("")
    for one in ("first", "second"):
        (tmp_path / "runs" / one).mkdir(parents=True)
        write_run_format(tmp_path / "runs" / one)
    assert cli.main(["watch", str(tmp_path / name)]) == 2
    said = capsys.readouterr()
    assert "is not a run directory" in said.err
    assert (f"{tmp_path}/runs/second" in said.err) == (name == "runs")
    assert "waiting" not in said.out


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "lines"


def test_a_file_that_is_not_there_yet_has_no_lines(path: Path) -> None:
    assert FollowedLines(path).read() == (False, [])


def test_a_line_is_read_once_and_when_it_is_complete(path: Path) -> None:
    lines, file = FollowedLines(path), path.open("a", buffering=1)
    file.write("one\ntw")
    file.flush()
    assert lines.read() == (False, ["one"])
    file.write("o\n")
    assert lines.read() == (False, ["two"])
    assert lines.read() == (False, [])


@pytest.mark.parametrize("content", ["", "one\n", "One\ntwo\nthree\n", "x\n" * 50])
def test_a_file_that_was_replaced_is_read_from_its_begin(path: Path, content: str) -> None:
    path.write_text("one\ntwo\n")
    lines = FollowedLines(path)
    lines.read()
    path.write_text(content)
    assert lines.read() == (True, content.splitlines())


def test_a_file_that_was_cut_and_has_grown_beyond_the_place_since_is_read_again(path: Path) -> None:
    path.write_text('{"step": 1}\n{"step": 2}\n')
    lines = FollowedLines(path)
    lines.read()
    path.write_text('{"step": 1}\n{"step": 3}\n{"step": 4}\n')
    again, found = lines.read()
    assert (again, len(found)) == (True, 3)


@given(
    st.lists(st.text(st.characters(codec="utf-8", exclude_characters="\n")), max_size=20),
    st.lists(st.integers(0, 30), max_size=20),
)
def test_however_a_file_grows_each_line_is_read_once(texts: list[str], parts: list[int]) -> None:
    data, found = "".join(f"{text}\n" for text in texts).encode(), list[str]()
    with tempfile.NamedTemporaryFile(buffering=0) as file:
        lines, at = FollowedLines(Path(file.name)), 0
        for size in [*parts, len(data)]:
            file.write(data[at : at + size])
            at += size
            again, new = lines.read()
            assert not again
            found += new
    assert found == texts


def test_a_line_that_is_longer_than_one_look_does_not_stop_the_view(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(followed_run, "READ_BYTES", 8)
    path.write_text("x" * 20 + "\nab\n")
    lines, found = FollowedLines(path), list[str]()
    for _ in range(4):
        found += lines.read()[1]
    assert found[-1] == "ab"


def test_a_run_has_news_of_its_metrics_and_of_its_log(tmp_path: Path) -> None:
    run = FollowedRun(tmp_path)
    assert not run.look()
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "time": 2, "loss/total": 3}\nno row\n')
    (tmp_path / "run.log").write_text("2026-11-22T01:02:03 begun\n    and more\n")
    news = run.look()
    assert [(row.step, dict(row.values)) for row in news.rows] == [(1, {"loss/total": 3.0})]
    assert [message.text for message in news.messages] == ["begun\n    and more"]
    assert not run.look()
