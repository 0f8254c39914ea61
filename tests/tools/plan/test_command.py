"""``async_opd plan`` on the command line."""

from __future__ import annotations

import json
import sys
import xml.etree.ElementTree as ElementTree
from pathlib import Path
from typing import Any

import pytest

from async_opd.cli import main
from async_opd.config.yaml_text import dump_yaml
from tests.tools.plan.runs import CONFIG, write_run

pytestmark = pytest.mark.slow  # each simulates several runs

QUICKSTART = str(Path(__file__).parents[3] / "examples" / "quickstart.yaml")
SPEEDS: dict[str, Any] = {
    "prompt_tokens": 20,
    "response_tokens": 100,
    "rollout": {"step_s": 0.01},
    "teachers": {"a": {"tokens_per_s": 1e4}},
    "train": {"tokens_per_s": 5e3},
}


@pytest.fixture(autouse=True)
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    """Less to simulate: what is said is the same."""
    monkeypatch.setattr("async_opd.tools.plan.advice.SAMPLES", 300)
    monkeypatch.setattr("async_opd.tools.plan.measured.SAMPLES", 2_000)


def write_config(directory: Path, plan: dict[str, Any] | None, **others: Any) -> str:
    tree = {**CONFIG, **others} | ({} if plan is None else {"plan": plan})
    file = directory / "config.yaml"
    file.write_text(dump_yaml(tree), encoding="utf-8")
    return str(file)


def planned(file: str, tmp_path: Path, *arguments: str) -> dict[str, Any]:
    """The JSON document of a plan."""
    import contextlib
    import io

    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        assert main(["plan", file, "--json", "--out", str(tmp_path / "out"), *arguments]) == 0
    document: dict[str, Any] = json.loads(out.getvalue())
    return document


def refused(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """What is said about bad input."""
    assert main(["plan", *arguments]) == 2
    return capsys.readouterr().err


def test_the_quickstart_has_speeds(tmp_path: Path) -> None:
    document = planned(QUICKSTART, tmp_path)
    assert 100 < document["prediction"]["samples_per_s"] < 500
    assert document["advice"]["split"] == {"rollout": 1, "teachers": [1, 1], "ranks": 1}


def test_the_table_says_how_busy_each_pool_is(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["plan", write_config(tmp_path, SPEEDS), "--out", str(tmp_path)]) == 0
    shown = capsys.readouterr().out
    assert "teacher/a" in shown
    assert "samples/s" in shown


def test_the_picture_is_well_formed(tmp_path: Path) -> None:
    document = planned(write_config(tmp_path, SPEEDS), tmp_path)
    root = ElementTree.parse(document["chart"]).getroot()
    assert root.tag.endswith("svg")
    texts = {one.text for one in root.findall(".//{*}text")}
    assert {"samples/s by staleness threshold", "samples/s by split of 3 GPUs"} <= texts


def test_a_plan_without_the_extra_report_has_no_picture(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "altair", None)
    assert main(["plan", write_config(tmp_path, SPEEDS), "--out", str(tmp_path / "out")]) == 0
    assert 'not drawn: it needs altair → pip install "async-opd[report]"' in capsys.readouterr().out
    assert not (tmp_path / "out").exists()


def test_more_gpus_go_to_the_pool_that_is_the_limit(tmp_path: Path) -> None:
    document = planned(write_config(tmp_path, SPEEDS), tmp_path, "--gpus", "12")
    split = document["advice"]["split"]
    assert split["rollout"] + sum(split["teachers"]) + split["ranks"] <= 12
    assert (
        document["advice"]["prediction"]["samples_per_s"]
        > 2 * document["prediction"]["samples_per_s"]
    )


def test_no_more_servers_of_somebody_else_are_advised_than_there_are(tmp_path: Path) -> None:
    server = {"kind": "endpoint", "urls": ["http://one"], "served_model": "m"}
    file = write_config(tmp_path, SPEEDS, teachers={"a": server})
    split = planned(file, tmp_path, "--gpus", "12")["advice"]["split"]
    assert split["teachers"] == [1]
    assert split["rollout"] + split["ranks"] <= 12


def test_pools_that_take_turns_are_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = write_config(tmp_path, SPEEDS)
    turns = "teachers.a.placement=colocated", "teachers.a.with=rollout"
    said = refused(capsys, file, *turns)
    assert "teachers.a.placement" in said
    assert "time sharing of GPUs" in said


def test_the_advised_threshold_keeps_nearly_all_of_the_throughput(tmp_path: Path) -> None:
    advice = planned(write_config(tmp_path, SPEEDS), tmp_path)["advice"]
    _, most = advice["by_threshold"][-1]
    assert advice["prediction"]["samples_per_s"] > 0.93 * most


def test_flags_and_overrides_change_what_is_planned(tmp_path: Path) -> None:
    file = write_config(tmp_path, SPEEDS)
    flags = ("--staleness-threshold", "0", "--sync-steps", "1")
    assert planned(file, tmp_path, *flags)["prediction"]["mean_staleness"] == 0.0
    slower = planned(file, tmp_path, "plan.train.tokens_per_s=500")
    assert slower["prediction"]["bottleneck"] == "train"


def test_a_run_directory_gets_its_picture_beside_its_metrics(tmp_path: Path) -> None:
    directory = write_run(tmp_path / "run")
    assert main(["plan", str(directory)]) == 0
    assert (directory / "plan.svg").exists()


def test_a_run_is_compared_with_what_it_measured(tmp_path: Path) -> None:
    directory = str(write_run(tmp_path / "run"))
    assert planned(directory, tmp_path)["measured"]["samples_per_s"] == 32.0


def test_with_overrides_there_is_nothing_to_compare_with(tmp_path: Path) -> None:
    directory = str(write_run(tmp_path / "run"))
    assert planned(directory, tmp_path, "rollout.replicas=2")["measured"] is None


def test_the_speeds_of_a_run_are_printed_as_a_section(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["plan", str(write_run(tmp_path / "run"))]) == 0
    assert "\nplan:\n  prompt_tokens: 20.0\n" in capsys.readouterr().out


def test_a_config_without_speeds_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert "plan: is missing" in refused(capsys, write_config(tmp_path, None))


def test_all_problems_are_named_at_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    plan = {
        **SPEEDS,
        "rollout": {"step_s": 0.0},
        "teachers": {"b": {"tokens_per_s": 1e4, "share": 0.4}},
    }
    said = refused(capsys, write_config(tmp_path, plan), "--gpus", "2")
    for key in ("plan.teachers.a", "plan.teachers.b", "plan.rollout.step_s", "--gpus"):
        assert key in said


def test_a_speed_of_nothing_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    plan = {**SPEEDS, "train": {"tokens_per_s": 0}}
    assert "plan.train.tokens_per_s" in refused(capsys, write_config(tmp_path, plan))


def test_too_few_gpus_are_refused_with_the_arithmetic(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = write_config(tmp_path, SPEEDS)
    said = refused(capsys, file, "rollout.tensor_parallel=4", "--gpus", "5")
    assert "found 5, expected at least 6: rollout 4, teacher a 1, train 1" in said


def test_a_missing_file_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert "no-such.yaml does not exist" in refused(capsys, "no-such.yaml")
