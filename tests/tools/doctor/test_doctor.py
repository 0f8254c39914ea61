"""``async_opd doctor``: every topic has a line, faults have remedies, the exit code follows."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from async_opd.core.errors import Problem
from async_opd.processes.listening import listening_socket
from async_opd.tools.doctor.examination import ORDER, Examination, examine
from async_opd.tools.doctor.machine import disk, network, wandb_login
from tests.checks.inputs import EXAMPLE, FEW, GOOD, config, rows
from tests.world.cli import Cli

NOT_ASKED = {"teachers", "engines"}
"""Topics of teachers' servers, and of ``--engines``."""


def examined(*overrides: str, prompts: int = 2) -> Examination:
    return examine(config(*overrides), "c.yaml", prompts, environment=list)


def errors(found: Examination) -> dict[str, str]:
    return {one.topic: one.found for one in found.findings if one.status == "error"}


def test_every_topic_of_a_working_run_has_a_line(cli: Cli) -> None:
    document = json.loads(cli("doctor", EXAMPLE, *FEW, "log.wandb=off", "--json").out)
    assert {one["topic"] for one in document["findings"]} == set(ORDER) - NOT_ASKED
    faults = [one for one in document["findings"] if one["status"] != "ok"]
    assert not [one for one in faults if "torchvision" not in one["found"]]
    assert (document["works"], len(document["prompts"])) == (True, 3)


def test_a_run_that_could_not_work_ends_with_2_and_a_remedy_for_each_error(cli: Cli) -> None:
    said = cli("doctor", EXAMPLE, *FEW, "student.model=/no/such", code=2).out
    assert "error   models       student.model: no such directory: /no/such\n    → check" in said
    assert "a run could not work here: 1 error," in said


def test_a_config_that_cannot_be_loaded_still_has_its_environment(cli: Cli) -> None:
    said = cli("doctor", EXAMPLE, "student.modl=x", code=2).out
    assert "error   config       student.modl: unknown key" in said
    assert "did you mean student.model?" in said
    assert "ok      environment  torch " in said


@pytest.mark.slow
def test_nothing_heavy_is_imported() -> None:
    code = (
        "import sys; from async_opd.cli import main; "
        f"main(['doctor', {str(EXAMPLE)!r}, *{FEW!r}, 'log.wandb=off']); "
        "print({'torch', 'ray', 'vllm', 'transformers', 'wandb'} & set(sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.stdout.splitlines()[-1] == "set()", done.stderr


def test_prompts_are_shown_as_the_models_read_them_one_of_each_source(tmp_path: Path) -> None:
    shown = examined(rows(tmp_path, *GOOD)).prompts
    assert [(one.data_source, one.reader, one.text) for one in shown] == [
        ("reverse", "student and reverse", "x"),
        ("sort", "student and sort", "sort 1="),
    ]


def test_a_teachers_other_prompt_is_shown_beside_the_students(tmp_path: Path) -> None:
    shown = examined(rows(tmp_path, *GOOD), "teachers.sort.prompt_template='7{prompt}'").prompts
    assert [(one.reader, one.text) for one in shown if one.data_source == "sort"] == [
        ("student", "sort 1="),
        ("sort", "7sort 1="),
    ]


def test_the_share_of_prompts_over_the_limit_is_a_warning(tmp_path: Path) -> None:
    cut = ("data.max_prompt_tokens=6", "data.overlong=truncate_left")
    found = examined(rows(tmp_path, *GOOD), *cut).findings
    (line,) = (one for one in found if one.topic == "lengths" and "data.train" in one.found)
    assert (line.status, "50.0% over the limit of 6" in line.found) == ("warning", True)
    assert "longest 7 tokens" in line.found


def test_problems_of_the_input_are_errors_of_their_topics(tmp_path: Path) -> None:
    found = errors(examined("data.train=[/no.jsonl]", "cluster.device=cuda", "rollout.replicas=9"))
    assert set(found) == {"data", "devices"}


def test_teachers_servers_are_asked_and_their_problems_are_errors() -> None:
    served = config(
        "teachers.sort={kind: endpoint, urls: ['http://127.0.0.1:9/v1'], served_model: sort}"
    )
    problem = Problem("c.yaml", "teachers.sort", "serves nothing", "start it")
    found = examine(served, "c.yaml", 1, list, lambda config, where: [problem])
    assert errors(found)["teachers"] == "teachers.sort: serves nothing"
    found = examine(served, "c.yaml", 1, list, lambda config, where: [])
    assert "teachers" in {one.topic for one in found.findings if one.status == "ok"}


def test_a_topic_that_fails_is_an_error_and_the_others_go_on() -> None:
    found = Examination()
    found.add("disk", lambda: [1 / 0])  # type: ignore[list-item]
    assert (found.works, "ZeroDivisionError" in errors(found)["disk"]) == (False, True)


def test_a_disk_without_room_for_the_checkpoints_is_an_error() -> None:
    (full,) = disk(config(), free=1 << 20)
    (free,) = disk(config(), free=1 << 30)
    assert (full.status, free.status) == ("error", "ok")
    assert "3 checkpoints, one of them being written" in full.found
    assert "checkpoint.keep" in full.remedy


def test_a_run_directory_below_a_file_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    (line,) = disk(config(f"run_dir={tmp_path}/file/run"))
    assert (line.status, "not a folder" in line.found) == ("error", True)


def test_a_mirror_that_can_be_written_is_ok_and_keeps_no_probe(tmp_path: Path) -> None:
    mirror, _ = disk(config(f"checkpoint.mirror=file://{tmp_path}/bucket/a"), free=1 << 30)
    assert mirror.status == "ok"
    assert "can be written; it has no checkpoint" in mirror.found
    assert list((tmp_path / "bucket/a").iterdir()) == []


def test_a_mirror_that_cannot_be_written_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "bucket").touch()
    mirror, _ = disk(config(f"checkpoint.mirror=file://{tmp_path}/bucket/a"), free=1 << 30)
    assert (mirror.status, "cannot be used" in mirror.found) == ("error", True)
    assert "credentials" in mirror.remedy


def test_taken_ports_are_counted() -> None:
    with listening_socket("127.0.0.1") as taken:
        port = taken.getsockname()[1]
        line = next(iter(network(config(f"cluster.ports={port}-{port}"), "cpu")))
    assert (line.status, "0 of 1 ports" in line.found) == ("error", True)


@pytest.mark.parametrize(
    ("wanted", "own", "status"),
    [
        ("auto", "online", "ok"),
        ("auto", "offline", "warning"),
        ("online", "offline", "error"),
        ("offline", "online", "ok"),
        ("off", "online", "ok"),
    ],
)
def test_a_run_that_would_not_reach_wandb_is_a_warning_or_an_error(
    wanted: str, own: str, status: str
) -> None:
    (line,) = wandb_login(config(f"log.wandb={wanted}"), lambda: own)
    assert (line.status, bool(line.remedy)) == (status, status != "ok")
