"""Code that a config names: looked for by commands that only examine, run by those that say so."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from async_opd.checks.preflight import preflight
from async_opd.models.processor import ImageProcessor, ProcessorError
from tests.checks.inputs import config, model, pictured_row, rows
from tests.fuzz.command import STUDENT, Said, command, good, written
from tests.security.test_wandb import server

MODULE = """
import os
os.makedirs({made!r}, exist_ok=True)
from rollouter.transports.gloo import DEVICES, receiver, sender

def compute_score(solution_str):
    return 1.0

def loss(log_p, log_q):
    return (log_q - log_p).sum(-1), 0 * log_q + 1

class Logger:
    def __init__(self, config, run_dir):
        pass

def rows():
    yield {{"prompt": "sort 210=", "data_source": "sort", "answer": "012"}}
"""
TEMPLATE = (
    "{% for part in messages[0].content %}{{ '!' if part.type == 'image' else 'x' }}{% endfor %}"
)
KEYS = {"eval.grader", "reward.grader", "loss.function", "log.loggers", "sync.backend"}
SOURCES = {"data.train", "data.eval", "cold_start.data"}
PLACES = ("package", "loss", "logger", "rows", "score", "transport", "beside")


def naming(place: str) -> dict[str, Any]:
    """Sections of a config that name code of ``place`` wherever one can."""
    rows = [{"kind": "user", "function": f"{place}.rows:rows"}]
    return {
        "data": {"train": rows, "eval": rows},
        "cold_start": {"steps": 1, "data": rows},
        "eval": {"grader": "grader.py" if place == "theirs" else "no_grader.py"},
        "reward": {"grader": f"{place}.score:compute_score"},
        "loss": {"kind": "user", "function": f"{place}.loss:loss"},
        "log": {"wandb": "off", "loggers": [f"{place}.logger:Logger"]},
        "sync": {"backend": f"{place}.transport:"},
    }


@pytest.fixture
def exploded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Has a folder for each module of a stranger's that was imported."""
    package, made = tmp_path / "path" / "theirs", tmp_path / "exploded"
    package.mkdir(parents=True)
    files = {place: package / f"{place}.py" for place in PLACES}
    files |= {"package": package / "__init__.py", "beside": tmp_path / "grader.py"}
    for place, file in files.items():
        file.write_text(MODULE.format(made=str(made / place)))
    monkeypatch.syspath_prepend(tmp_path / "path")
    for name in [name for name in sys.modules if name.partition(".")[0] == "theirs"]:
        monkeypatch.delitem(sys.modules, name)
    made.mkdir()
    return made


def initialized(folder: Path, place: str) -> Said:
    (folder / "train.jsonl").write_text("{}")
    given = ["--student", str(STUDENT), "--teacher", str(STUDENT), "--data", "x"]
    for section, keys in (good(folder) | naming(place)).items():
        if section not in ("name", "student", "teachers"):
            given += ["--set", f"{section}={json.dumps(keys)}"]
    return command("init", str(folder / "made.yaml"), *given)


def checked(folder: Path, place: str, *flags: str) -> Said:
    return command("check", str(written(folder, good(folder) | naming(place))), *flags)


def examined(folder: Path, place: str) -> Said:
    return command("doctor", str(written(folder, good(folder) | naming(place))))


def tried(folder: Path, place: str) -> Said:
    file = str(written(folder, good(folder) | naming(place)))
    return command("run", file, "--dry-run")


def loaded(folder: Path, place: str) -> Said:
    return checked(folder, place, "--load")


FIND, LOAD = [checked, examined, initialized], [loaded, tried]


@pytest.mark.parametrize("use", FIND)
def test_a_command_that_only_examines_a_config_runs_none_of_its_code(
    tmp_path: Path, exploded: Path, use: Any
) -> None:
    said = use(tmp_path, "theirs")
    assert list(exploded.iterdir()) == []
    assert not any(f"{key}:" in said.out + said.err for key in KEYS), said
    assert (
        "theirs.rows:rows is not called: its rows are checked by async_opd check --load" in said.out
    )
    assert "cannot be examined" not in said.out
    assert said.code == 0 or use is examined  # what else the machine lacks is not asked here


@pytest.mark.parametrize("use", LOAD)
def test_it_runs_where_the_command_says_so(tmp_path: Path, exploded: Path, use: Any) -> None:
    said = use(tmp_path, "theirs")
    assert said.code == 0, said
    assert {one.name for one in exploded.iterdir()} == set(PLACES)


@pytest.mark.parametrize("use", [*FIND, *LOAD])
def test_all_code_that_is_not_there_is_named_at_once(
    tmp_path: Path, exploded: Path, use: Any
) -> None:
    said = use(tmp_path, "nowhere")
    assert said.code == 2
    assert [key for key in KEYS | SOURCES if f"{key}: " not in said.out + said.err] == []


@pytest.mark.parametrize(
    ("given", "shown"),
    [(("check",), []), (("doctor",), []), (("check", "--load"), ["Bearer a-private-value"])],
)
def test_no_variable_is_sent_to_a_server_by_a_command_that_only_examines(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, given: tuple[str, ...], shown: list[str]
) -> None:
    monkeypatch.setenv("PRIVATE", "a-private-value")
    name, *flags = given
    with server() as (url, asked):
        served = {"kind": "endpoint", "urls": [url], "served_model": "m", "api_key_env": "PRIVATE"}
        file = written(tmp_path, good(tmp_path) | {"teachers": {"sort": served}})
        said = command(name, str(file), *flags)
    assert sorted({str(one) for one in asked}) == shown
    assert ("its servers are not asked" in said.out) == (not flags)


@pytest.mark.parametrize("load", [False, True])
def test_the_image_processor_of_a_trusted_student_is_code_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, load: bool
) -> None:
    trusted: list[bool] = []

    def asked(model: str, *, trust_remote_code: bool, **_: Any) -> Any:
        trusted.append(trust_remote_code)
        raise ProcessorError("it is of another package", "install it")

    monkeypatch.setattr(ImageProcessor, "load", asked)
    vision = model(tmp_path, "student", model_type="qwen3_vl", vision_config={}, image_token_id=5)
    (vision / "chat_template.jinja").write_text(TEMPLATE)
    given = [f"student.model={vision}", "student.trust_remote_code=true"]
    preflight(config(*given, rows(tmp_path, pictured_row())), "c.yaml", 0, load)
    assert trusted == [load]
