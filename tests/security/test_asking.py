"""transformers asks neither the user nor a hub, whatever the files of a model name.

With its own classes: a process of commands has "y" on its standard input and a hub that answers.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from tests.checks.inputs import pictured_row
from tests.fuzz.command import ROOT, STUDENT, good, written
from tests.security.test_given_runs import forge
from tests.tools.test_export import run_of

pytestmark = pytest.mark.slow

PROCESS = """
import contextlib, io, json, os, sys
from pathlib import Path
from async_opd.cli import main

def load(kind, folder):
    if kind == "student":
        from trainer.student.loading import EmptyStudent
        EmptyStudent(Path(folder))
    else:
        from async_opd.models.processor import ImageProcessor
        ImageProcessor.load(folder)

main(["completion", "bash"])
for name, words in json.load(open(sys.argv[1])).items():
    said, code = io.StringIO(), None
    with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
        print("BEGIN", name, file=sys.__stderr__, flush=True)
        try:
            code = load(*words) if words[0] in ("student", "processor") else main(words)
        except Exception as error:
            said.write(f"{type(error).__name__}: {error}")
    print(json.dumps({"name": name, "code": code, "said": said.getvalue()}), file=sys.__stderr__)
"""
QUESTION = "Do you wish to run the custom code?"
WITHOUT_TOKENIZER = ("llava_onevision", "gemma4", "paligemma", "idefics3")
"""Families whose processor transformers loads without the trust that it was given."""
CODE = "import os; os.makedirs({made!r}, exist_ok=True)"


def students(folder: Path) -> dict[str, dict[str, Any]]:
    """Settings of a config.json for which transformers asks, by name. ``folder``: the model's."""
    theirs = {"auto_map": {"AutoModel": f"{folder}--code_of_mine.M"}}
    named = {"model_type": "dpt", "backbone": "attacker/repo"}
    return {
        "code in a tower": {
            "model_type": "llava",
            "vision_config": {"model_type": "trocr"} | theirs,
        },
        "backbone": named,
        "backbone of timm": {"model_type": "detr", "backbone": "a/b", "use_timm_backbone": False},
        "backbone in a tower": {"model_type": "llava", "vision_config": named},
        "backbone of a family": {"model_type": "edgetam_vision_model"},
        "backbone of a text part": {
            "model_type": "llava",
            "text_config": {"model_type": "edgetam_vision_model"},
        },
    }


def processors(folder: Path) -> dict[str, tuple[dict[str, Any], dict[str, Any]]]:
    """Settings of config.json and tokenizer_config.json for which a processor asks, by name."""
    theirs = {"auto_map": {"AutoTokenizer": [f"{folder}--code_of_mine.T"] * 2}}
    named = {"model_type": "dpt", "backbone": "attacker/repo"}
    asking = {kind: ({"model_type": kind}, theirs) for kind in WITHOUT_TOKENIZER}
    tower = {"model_type": "llava", "vision_config": named}
    return asking | {"backbone": (named, {}), "backbone in a tower": (tower, {})}


@dataclass(frozen=True)
class Done:
    """How each command ended, what it printed, and what the hub was asked for meanwhile."""

    codes: dict[str, int | None]
    said: dict[str, str]
    asked: list[str]
    exploded: Path


@pytest.fixture(scope="module")
def hub() -> Iterator[tuple[str, list[str]]]:
    """A hub that has every model, and what it was asked for."""
    asked: list[str] = []

    class Hub(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            asked.append(f"{self.command} {self.path}")
            found = {"id": "a/b", "sha": "a" * 40, "siblings": [], "model_type": "resnet"}
            answer = json.dumps(found).encode()
            self.send_response(200)
            self.send_header("ETag", '"abc"')
            self.send_header("X-Repo-Commit", "a" * 40)
            self.send_header("Content-Length", str(len(answer)))
            self.end_headers()
            if self.command == "GET":
                self.wfile.write(answer)

        do_HEAD = do_GET  # noqa: N815 - their names

        def log_message(self, *_: object) -> None: ...

    with ThreadingHTTPServer(("127.0.0.1", 0), Hub) as listening:
        threading.Thread(target=listening.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{listening.server_port}", asked
        listening.shutdown()


def with_code(model: Path, made: Path) -> None:
    (model / "code_of_mine.py").write_text(CODE.format(made=str(made)))


def exporting(folder: Path, base: Path, made: Path) -> Iterator[tuple[str, list[str]]]:
    """Commands that load students: an export of a run directory, and the trainer's own loading."""
    for number, name in enumerate(students(folder)):
        theirs = folder / f"run {number}"
        shutil.copytree(base, theirs)
        student = theirs / "student"
        text = json.loads((student / "config.json").read_text())
        settings = students(student)[name]
        if settings["model_type"] == "llava":
            named = {key: text.get(key) for key in ("vocab_size", "eos_token_id")}
            settings = named | {"text_config": text, "vision_config": {}} | settings
        else:
            settings = text | settings
        (student / "config.json").write_text(json.dumps(settings))
        with_code(student, made)
        checkpoint = theirs / "run" / "checkpoints" / "step_2"
        yield f"export: {name}", ["export", str(checkpoint), str(theirs / "out")]
        yield f"student: {name}", ["student", str(student)]


def checking(folder: Path, made: Path) -> Iterator[tuple[str, list[str]]]:
    """Commands that load processors: check with an image, and the loading itself."""
    for number, name in enumerate(processors(folder)):
        place = folder / f"check {number}"
        place.mkdir()
        student = place / "student"
        shutil.copytree(STUDENT, student)
        settings, tokenizer = processors(student)[name]
        text = json.loads((student / "config.json").read_text())
        vision = text | {"image_token_id": 5, "vision_config": {}} | settings
        (student / "config.json").write_text(json.dumps(vision))
        (student / "tokenizer_config.json").write_text(json.dumps(tokenizer))
        (student / "preprocessor_config.json").write_text("{}")
        (student / "chat_template.jinja").write_text("{{ messages }}")
        with_code(student, made)
        tree = good(place) | {"student": {"model": str(student)}}
        (place / "train.jsonl").write_text(json.dumps(pictured_row()) + "\n")
        yield f"check: {name}", ["check", str(written(place, tree))]
        yield f"processor: {name}", ["processor", str(student)]


@pytest.fixture(scope="module")
def done(hub: tuple[str, list[str]], tmp_path_factory: pytest.TempPathFactory) -> Done:
    """The results of all commands, in one process."""
    folder = tmp_path_factory.mktemp("asking")
    (folder / "base").mkdir()
    forge(run_of(folder / "base"), lambda tree: tree["student"].update(model="../student"))
    made = folder / "exploded"
    commands = {**dict(exporting(folder, folder / "base", made)), **dict(checking(folder, made))}
    (folder / "commands.json").write_text(json.dumps(commands))
    address, asked = hub
    more = {
        "HF_ENDPOINT": address,
        "HF_HOME": str(folder / "cache"),
        "HF_TOKEN": "hf_of_the_user",
        "PYTHONPATH": str(ROOT),
    }
    offline = ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE")
    kept = {name: value for name, value in os.environ.items() if name not in offline}
    ran = subprocess.run(
        [sys.executable, "-c", PROCESS, str(folder / "commands.json")],
        input="y\n" * 1000,
        env=kept | more,
        capture_output=True,
        text=True,
        timeout=400,
        check=False,
    )
    lines = [line for line in ran.stderr.splitlines() if line.startswith('{"name"')]
    found = [json.loads(line) for line in lines]
    assert [one["name"] for one in found] == list(commands), ran.stderr[-3000:]
    codes = {one["name"]: one["code"] for one in found}
    said = {one["name"]: one["said"] for one in found}
    return Done(codes, said | {"": ran.stdout}, list(asked), made)


COMMANDS = [f"{use}: {name}" for use in ("export", "student") for name in students(Path("/"))]
COMMANDS += [f"{use}: {name}" for use in ("check", "processor") for name in processors(Path("/"))]


def test_no_code_of_a_model_has_run(done: Done) -> None:
    assert not done.exploded.exists()


def test_no_hub_was_asked(done: Done) -> None:
    assert done.asked == []


@pytest.mark.parametrize("name", ["", *COMMANDS])
def test_the_user_was_not_asked(done: Done, name: str) -> None:
    assert QUESTION not in done.said[name]


@pytest.mark.parametrize("name", [one for one in COMMANDS if one.startswith(("export", "check"))])
def test_the_command_refuses_the_model_as_bad_input(done: Done, name: str) -> None:
    assert (done.codes[name], done.said[name].count("student.model") > 0) == (2, True), done.said[
        name
    ]


@pytest.mark.parametrize("name", [one for one in COMMANDS if one.startswith("student")])
def test_the_trainer_names_the_model_that_transformers_refuses(done: Done, name: str) -> None:
    assert "StageError: trainer: student.model: transformers makes no model of" in done.said[name]


@pytest.mark.parametrize("name", [one for one in COMMANDS if one.startswith("processor")])
def test_a_processor_that_would_ask_has_not_loaded(done: Done, name: str) -> None:
    assert "ProcessorError: " in done.said[name]
