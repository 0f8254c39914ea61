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
from tests.world.cli import Cli

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
    """Less to simulate; the text is the same."""
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


def refused(cli: Cli, *arguments: str) -> str:
    """The error text of a plan of bad input."""
    return cli("plan", *arguments, code=2).err


def test_the_quickstart_has_speeds(tmp_path: Path) -> None:
    document = planned(QUICKSTART, tmp_path)
    assert 100 < document["prediction"]["samples_per_s"] < 500
    assert document["advice"]["split"] == {"rollout": 1, "teachers": [1, 1], "ranks": 1}


def test_a_plan_without_the_extra_report_has_no_picture(
    tmp_path: Path, cli: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "altair", None)
    printed = cli("plan", write_config(tmp_path, SPEEDS), "--out", tmp_path / "out")
    assert 'not drawn: it needs altair → pip install "async-opd[report]"' in printed.out
    assert not (tmp_path / "out").exists()


def test_a_plan_has_the_traffic_of_a_mean_sample_and_the_gpus_at_which_a_process_binds(
    tmp_path: Path,
) -> None:
    document = planned(write_config(tmp_path, SPEEDS), tmp_path)
    traffic, rate = document["traffic"], document["prediction"]["samples_per_s"]
    moved = {f"{one['source']} → {one['target']}": one["nbytes"] for one in traffic["arrows"]}
    assert moved["queue → ranks"] > moved["queue → scorer"] > moved["driver → queue"] > 0
    first = next(iter(traffic["limits"]))
    assert first in ("queue", "scorer")
    assert traffic["gpus"][first] == pytest.approx(3 * traffic["limits"][first] / rate)


def test_hidden_states_of_a_model_that_is_not_here_have_no_known_traffic(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    loss = {"kind": "forward_kl", "support": "full_vocab"}
    file = write_config(tmp_path, SPEEDS, loss=loss)
    assert planned(file, tmp_path)["traffic"] is None
    assert main(["plan", file, "--out", str(tmp_path / "out")]) == 0
    assert "traffic     unknown" in capsys.readouterr().out


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


def test_the_advised_threshold_keeps_the_throughput_and_is_drawn(tmp_path: Path) -> None:
    document = planned(write_config(tmp_path, SPEEDS), tmp_path)
    _, most = document["advice"]["by_threshold"][-1]
    assert document["advice"]["prediction"]["samples_per_s"] > 0.93 * most
    root = ElementTree.parse(document["chart"]).getroot()
    texts = {one.text for one in root.findall(".//{*}text")}
    assert {"samples/s by staleness threshold", "samples/s by split of 3 GPUs"} <= texts


def test_flags_and_overrides_change_what_is_planned(tmp_path: Path) -> None:
    file = write_config(tmp_path, SPEEDS)
    flags = ("--staleness-threshold", "0", "--sync-steps", "1")
    assert planned(file, tmp_path, *flags)["prediction"]["mean_staleness"] == 0.0
    slower = planned(file, tmp_path, "plan.train.tokens_per_s=500")
    assert slower["prediction"]["bottleneck"] == "train"


def test_a_run_is_compared_with_what_it_measured_unless_overrides_change_it(
    tmp_path: Path, cli: Cli
) -> None:
    directory = write_run(tmp_path / "run")
    shown = cli("plan", directory).out
    assert "\nplan:\n  prompt_tokens: 20.0\n" in shown
    assert "teacher/a" in shown
    assert "traffic of a mean sample" in shown
    assert (directory / "plan.svg").exists()
    assert planned(str(directory), tmp_path)["measured"]["samples_per_s"] == 32.0
    assert planned(str(directory), tmp_path, "rollout.replicas=2")["measured"] is None


FAULTY = {
    **SPEEDS,
    "rollout": {"step_s": 0.0},
    "teachers": {"b": {"tokens_per_s": 1e4, "share": 0.4}},
}
TURNS = ["teachers.a.placement=colocated", "teachers.a.with=rollout"]


@pytest.mark.parametrize(
    ("plan", "arguments", "words"),
    [
        (None, [], ["plan: is missing"]),
        (
            FAULTY,
            ["--gpus", "2"],
            ["plan.teachers.a", "plan.teachers.b", "plan.rollout.step_s", "--gpus"],
        ),
        ({**SPEEDS, "train": {"tokens_per_s": 0}}, [], ["plan.train.tokens_per_s"]),
        (
            SPEEDS,
            ["rollout.tensor_parallel=4", "--gpus", "5"],
            ["found 5, expected at least 6: rollout 4, teacher a 1, train 1"],
        ),
        (SPEEDS, TURNS, ["teachers.a.placement", "time sharing of GPUs"]),
    ],
    ids=["no speeds", "all problems at once", "a speed of nothing", "too few GPUs", "turns"],
)
def test_what_cannot_be_planned_is_refused_with_the_reason(
    tmp_path: Path, cli: Cli, plan: dict[str, Any] | None, arguments: list[str], words: list[str]
) -> None:
    text = refused(cli, write_config(tmp_path, plan), *arguments)
    assert [one for one in words if one not in text] == []


def test_a_missing_file_is_refused(cli: pytest.CaptureFixture[str]) -> None:
    assert "no-such.yaml does not exist" in refused(cli, "no-such.yaml")
