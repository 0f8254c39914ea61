"""The HTML of reports and comparisons: complete, self-contained, and hostile texts are inert."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from datetime import UTC, datetime
from html.parser import HTMLParser
from pathlib import Path

import pytest

from async_opd.checkpoint.mirror import Mirror
from async_opd.checkpoint.run_copies import RunCopies
from async_opd.checkpoint.store import Checkpoints
from async_opd.cli import main
from async_opd.config.load import load_config
from async_opd.config.sections.teachers import EndpointTeacher
from async_opd.core.errors import ConfigError
from async_opd.files.lines import MetricsRow
from async_opd.files.origin import add_origin, read_origins
from async_opd.observability.sinks import Status, Summary
from async_opd.tools.report.charts import shares_over_time
from async_opd.tools.report.comparison import differing_keys, labels
from async_opd.tools.report.facts import Facts, facts_of, gpus_of
from async_opd.tools.report.recorded_run import RecordedRun, read_recorded_run
from async_opd.tools.report.run_charts import evaluation_lines, metric_charts, sample_timelines
from async_opd.tools.report.run_report import report
from async_opd.tools.report.verdict import judge
from tests.tools.plan.runs import CONFIG, write_run
from tests.tools.report.pages import HOSTILE, write_full_run
from tests.world.cli import Cli
from tests.world.config import run_config

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("one_bundle")]

pytest.importorskip("vl_convert", reason="the extra report is not installed")
MOST = 3_000_000


class Tags(HTMLParser):
    """All tags of a page with their attributes, and the content of its scripts."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.found: list[tuple[str, dict[str, str | None]]] = []
        self.feed(html)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found.append((tag, dict(attrs)))


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> RecordedRun:
    return read_recorded_run(write_full_run(tmp_path_factory.mktemp("runs") / "full"))


@pytest.fixture(scope="module")
def html(run: RecordedRun) -> str:
    return report(run, judge(run), "With one more GPU, the plan predicts +20 % samples/s.")


def test_the_page_is_one_file_below_three_megabytes(html: str) -> None:
    assert len(html.encode()) < MOST
    sections = (
        *("the trainer limits", "the plan predicts +20 %", "Accuracy by source"),
        *("Gap to each teacher", "Several answers to each prompt", "Staleness of trained samples"),
        *("Rollout: computing and waiting", "The life of a sample", "is rebuilt"),
        *("3 dead letters", "commit 8d1f3a0c", "tokens_per_micro_batch"),
    )
    assert [text for text in sections if text not in html] == []
    tags = Tags(html).found
    from_outside = {"srcset", "data", "poster"}
    assert [a for _, a in tags if from_outside & a.keys()] == []
    assert all((a["src"] or "").startswith("data:image/") for _, a in tags if "src" in a)
    assert all(a["href"].startswith("#") for _, a in tags if a.get("href"))  # type: ignore[union-attr]
    assert not [tag for tag, _ in tags if tag in ("link", "iframe", "object", "base")]
    assert HOSTILE not in html  # a script in a text of the run is text
    assert html.count("<script") == 4  # data of charts and tokens, the bundle, the page's own
    assert "onerror=" not in "".join(f"{t} {sorted(a)}" for t, a in tags)


def test_the_policy_forbids_the_network_and_every_script_but_its_own(html: str) -> None:
    (policy,) = (a["content"] for t, a in Tags(html).found if a.get("http-equiv"))
    assert policy is not None
    assert policy.startswith("default-src 'none'; script-src 'sha256-")
    assert "unsafe-eval" not in policy
    assert "'unsafe-inline'" not in policy.split("style-src")[0]


def test_every_chart_is_valid_vega_lite_and_has_its_numbers_as_a_table(html: str) -> None:
    found = re.search(r'<script type="application/json" id="charts">(.*?)</script>', html)
    assert found is not None
    charts = json.loads(found[1])
    assert len(charts) >= 9
    assert html.count("<figure") == html.count("<summary>Numbers") == len(charts)
    altair = pytest.importorskip("altair")
    for spec in charts.values():
        altair.Chart.from_dict({"width": "container", "height": 210, **spec})


def test_a_run_that_was_evaluated_before_training_only_has_its_accuracy(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", steps=1)
    row = {"step": 0, "time": 1.0, "eval_initial/sort/accuracy": 0.125}
    with (folder / "metrics.jsonl").open("a") as file:
        file.write(json.dumps(row) + "\n")
    run = read_recorded_run(folder)
    assert "12.5%" in report(run, judge(run), "")
    for name in ("summary.json", "metrics.jsonl"):
        (folder / name).unlink()
    run = read_recorded_run(folder)
    assert "too few steps" in report(run, judge(run), "")


def test_accuracies_have_the_standard_errors_of_their_means(run: RecordedRun) -> None:
    found = {line.name: line for line in evaluation_lines(run)}
    assert [step for step, _ in found["math"].points] == list(range(0, 37, 4))
    first = found["math"].errors
    assert first is not None
    assert first[0] == pytest.approx((0.1 * 0.9 / 64) ** 0.5)


def test_the_life_of_a_sample_adds_up(run: RecordedRun) -> None:
    mean, single = sample_timelines(run.timelines)
    values = mean.spec["data"]["values"]
    assert [one["a"] for one in values[1:]] == [one["b"] for one in values[:-1]]
    assert (values[0]["a"], values[-1]["b"]) == (0, 1)
    longest = max(one["b"] for one in single.spec["data"]["values"])
    assert longest == max(life.whole for life in run.timelines) / 1e6


@pytest.mark.parametrize(
    ("level", "event"),
    [
        ("", "Ray is started again: its processes did not start in time"),
        ("WARNING ", "the trainer has the weights of version 4 from student/0 (bfloat16)"),
        ("WARNING ", "no weights of version 4 for the trainer: student/0: its process died"),
    ],
)
def test_what_happens_to_the_run_itself_is_an_event(level: str, event: str, tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run")
    (folder / "run.log").write_text(f"2026-11-22T10:00:00+00:00 {level}{event}\n")
    run = read_recorded_run(folder)
    assert f"{event}</td>" in report(run, judge(run), "")


@pytest.mark.parametrize("status", ["interrupted", "failed"])
def test_the_verdict_says_how_a_run_has_ended(tmp_path: Path, status: Status) -> None:
    folder = write_run(tmp_path / "run")
    ended = {"status": status, "seconds": 1.0, "error": "a cause"}
    (folder / "summary.json").write_text(json.dumps(ended))
    run = read_recorded_run(folder)
    how = "was interrupted" if status == "interrupted" else "failed"
    assert f"The run {how}: a cause" in report(run, judge(run), "")


def test_the_time_between_two_parts_of_a_run_is_no_wall_time(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", steps=0)
    for name in ("summary.json", "metrics.jsonl"):
        (folder / name).unlink()
    for day in (22, 24):
        begun = datetime(2026, 11, day, 10, tzinfo=UTC).timestamp() + 0.7
        add_origin(folder, ["run", "c.yaml"], clock=lambda begun=begun: begun)
    (folder / "run.log").write_text(
        "2026-11-22T10:00:00+00:00 starting Ray and the engines\n"
        "2026-11-22T10:00:30+00:00 checkpoint of step 1\n"
        "2026-11-24T10:00:00+00:00 going on after checkpoint 1\n"
        "2026-11-24T10:00:02+00:00 starting Ray and the engines\n"
        "2026-11-24T10:00:20+00:00 completed\n"
    )
    assert facts_of(read_recorded_run(folder)).seconds == 50


@pytest.mark.parametrize("same", [True, False])
def test_losses_by_source_and_by_teacher_are_one_chart_where_they_are_the_same(
    same: bool, tmp_path: Path
) -> None:
    folder = write_run(tmp_path / "run", steps=0)
    losses = {f"{of}/{name}/loss": 0.5 for of in ("source", "teacher") for name in ("sort", "add")}
    losses["teacher/add/loss"] += 1e-9 if same else 0.25
    rows = [{"step": step, "time": 1.0, "perf/step_s": 1.0, **losses} for step in (1, 2)]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    titles = [one.title for one in metric_charts(read_recorded_run(folder), "learning")]
    assert titles == (
        ["Loss by source, loss by teacher"] if same else ["Loss by source", "Loss by teacher"]
    )


@pytest.mark.parametrize(("device", "gpus"), [("cpu", 0), ("cuda", 3)])
def test_gpus_are_counted_on_the_runs_device(device: str, gpus: int, tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", steps=1)
    (folder / "origin.json").unlink(missing_ok=True)
    add_origin(folder, ["run", "c.yaml"], device=device)
    run = read_recorded_run(folder)
    assert run.config.cluster.device == "auto"
    assert facts_of(run).gpus == gpus
    facts = Facts(10, 7200.0, 100, 4e6, 1.0, 0.0, gpus=8, dead_letters=0)
    assert (facts.gpu_hours, facts.cost_of_million(2.5)) == (16, 2.5 * 16 / 4)
    assert facts.cost_of_million(None) is None


def test_gpus_of_pools_that_grew_are_those_of_their_mean_replicas() -> None:
    config = run_config(
        cluster={"address": "10.0.0.1:6379"},
        rollout={"replicas": {"min": 1, "max": 4}, "tensor_parallel": 2},
        eval={"replicas": {"min": 1, "max": 2}},
        teachers={"t": {"model": "t", "replicas": {"min": 2, "max": 3}}},
    )
    served = {"rollout/eval_replicas": 1.0, "teacher/t/serving": 1.0}
    rows = [
        MetricsRow(step, 0.0, {**served, "rollout/replicas": replicas})
        for step, replicas in enumerate((1.0, 4.0))
    ]
    assert gpus_of(config) == 1 + 2 + 2 + 2
    assert gpus_of(config, rows) == 1 + 2 * 2.5 + 2 + 2


def test_the_shares_of_a_window_are_drawn_over_its_time() -> None:
    found = shares_over_time(
        "k", "t", "n", ["a", "b"], [(2.0, 5.0, [1.0, 0.0]), (5.0, 9.0, [0.25, 0.75])], x="min"
    )
    values = [
        [one[key] for key in ("s", "x", "x2", "y", "y2")] for one in found.spec["data"]["values"]
    ]
    assert values == [["a", 2, 5, 0, 1], ["a", 5, 9, 0, 0.25], ["b", 5, 9, 0.25, 1]]
    assert found.rows == (("2", "5", "100%", "0%"), ("5", "9", "25%", "75%"))


def test_the_mean_staleness_is_drawn_over_the_largest(run: RecordedRun) -> None:
    (chart,) = (one for one in metric_charts(run, "staleness") if one.key == "staleness-steps")
    assert chart.spec["layer"][-1]["encoding"]["strokeDash"]["field"] == "s"
    names = dict.fromkeys(one["s"] for one in chart.spec["data"]["values"])
    assert list(names) == ["largest", "mean"]  # the later line is dashed, and drawn on top


def test_a_run_that_logs_warnings_only_does_not_claim_to_know_its_restarts(tmp_path: Path) -> None:
    config = {**CONFIG, "log": {"level": "warning"}}
    run = read_recorded_run(write_run(tmp_path / "run", steps=1, config=config))
    assert "log.level is warning" in report(run, judge(run), "")
    plain = read_recorded_run(write_run(tmp_path / "plain", steps=1))
    assert "log.level is" not in report(plain, judge(plain), "")


def test_a_run_of_two_parts_with_evaluations_is_judged_by_all_its_steps(tmp_path: Path) -> None:
    whole = write_full_run(tmp_path / "whole", hostile=False)
    parts = write_full_run(tmp_path / "parts", hostile=False)
    rows = [json.loads(one) for one in (parts / "metrics.jsonl").read_text().splitlines()]
    resumed = [{**one, "time": one["time"] + 86_400 * (one["step"] > 20)} for one in rows]
    (parts / "metrics.jsonl").write_text("".join(json.dumps(one) + "\n" for one in resumed))
    one, two = (judge(read_recorded_run(folder)) for folder in (whole, parts))
    assert (one.kind, one.evidence) == ("pool", two.evidence)
    assert facts_of(read_recorded_run(parts)).samples_per_s == pytest.approx(
        facts_of(read_recorded_run(whole)).samples_per_s
    )


def test_the_command_writes_the_report_and_says_the_verdict(
    run: RecordedRun, tmp_path: Path, cli: Cli
) -> None:
    out = tmp_path / "r.html"
    price = "report.gpu_hour_price=2"
    with pytest.raises(ConfigError, match="gpu_hour_price"):
        load_config(run.folder / "config.yaml", ["report.gpu_hour_price=-1"])
    assert main(["report", str(tmp_path)]) == 2
    assert "the trainer limits" in cli("report", run.folder, price, "--out", out, "--no-plan").out
    assert "cost per million tokens" in out.read_text(encoding="utf-8")


def test_a_mirror_is_reported_and_compared_as_its_run_directory_is(
    run: RecordedRun, tmp_path: Path, cli: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    url = f"file://{tmp_path}/runs/mirrored"
    mirror = Mirror(Checkpoints(run.folder.root / "checkpoints", 2), RunCopies.at(url), 20, 20)
    assert mirror.close(Summary("completed", None, 2, 1.0, run.folder.root)) is None
    shown = cli("report", url, "--no-plan").out
    printed = cli("report", run.folder, "--out", "own.html", "--no-plan")
    assert printed.out == shown.replace("report.html", "own.html")
    assert (tmp_path / "report.html").stat().st_size > 100_000
    assert main(["compare", url, str(run.folder), "--out", "compare.html"]) == 0
    assert "mirrored" in (tmp_path / "compare.html").read_text(encoding="utf-8")


def test_a_report_of_an_older_run_names_what_it_cannot_read(tmp_path: Path, cli: Cli) -> None:
    folder = write_run(tmp_path / "run", steps=7)
    with (folder / "config.yaml").open("a") as file:
        file.write("older: 1\n")
    assert "older: unknown key (value 1)" in cli("report", folder, "--no-plan").err
    assert "older: unknown key (value 1)" in (folder / "report.html").read_text()
    printed = cli("compare", folder, folder, "--out", tmp_path / "c.html")
    assert "older: unknown key (value 1)" in printed.err


def test_runs_are_compared_by_their_figures_and_differing_keys(
    run: RecordedRun, tmp_path: Path, cli: Cli
) -> None:
    other = write_full_run(tmp_path / "other", seed=1, factor=2.5, hostile=False)
    text = (other / "config.yaml").read_text().replace("sync_steps: 2", "sync_steps: 3")
    (other / "config.yaml").write_text(text)
    out = tmp_path / "c.html"
    assert "async.sync_steps" in cli("compare", run.folder, other, "--out", out).out
    page = out.read_text(encoding="utf-8")
    assert "async.sync_steps" in page
    assert HOSTILE not in page
    pair = [run, read_recorded_run(other)]
    keys = {key: values for key, *values in differing_keys(pair)}
    assert keys.pop("async.sync_steps") == ["2", "3"]
    assert list(keys) == ["data.train"]  # a path in its own folder
    assert labels(pair) == ["full", "other"]
    assert differing_keys([run, run]) == []
    assert len(set(labels([run, run]))) == 2


def test_each_start_of_a_run_is_added_to_its_origins(tmp_path: Path) -> None:
    def hide(text: str) -> str:
        return text.replace("secret", "HIDDEN")

    add_origin(tmp_path, ["run", "a b.yaml", "x=secret"], hide)
    add_origin(tmp_path, ["run", "c.yaml", "--resume"])
    first, second = read_origins(tmp_path)
    assert (first.command, second.command) == (
        "async_opd run 'a b.yaml' x=HIDDEN",
        "async_opd run c.yaml --resume",
    )
    assert first.versions["python"]
    (tmp_path / "origin.json").write_text('[{"command": 7}]')
    assert read_origins(tmp_path) == []


def test_a_config_does_not_say_of_which_variables_the_values_are_hidden(
    run: RecordedRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PRIVATE_HOST", "buildbox-417")
    server = EndpointTeacher(
        kind="endpoint",
        urls=["http://127.0.0.1:9"],
        served_model="buildbox-417",
        api_key_env="PRIVATE_HOST",
    )
    theirs = replace(run, config=run.config.model_copy(update={"teachers": {"t": server}}))
    keys = {key: values for key, *values in differing_keys([run, theirs])}
    assert keys["teachers.t.served_model"][1] == '"buildbox-417"'
    assert "served_model: buildbox-417" in report(theirs, judge(run), "")
