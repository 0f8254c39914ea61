"""``async_opd export``: the directory, its card, and its upload to a hub on this machine."""

from __future__ import annotations

import base64
import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file
from tokenizers import Tokenizer
from tokenizers.models import WordLevel

from async_opd.checkpoint.mirror import Mirror
from async_opd.checkpoint.run_copies import RunCopies
from async_opd.checkpoint.store import Checkpoints
from async_opd.cli import main
from async_opd.config.load import dump_config
from async_opd.files.durable import written_file
from async_opd.files.origin import add_origin
from async_opd.files.run_format import write_run_format
from async_opd.observability.sinks import Summary
from async_opd.tools.export import without_folders
from tests.checkpoint.test_store import cut
from tests.trainer.models import tiny_model
from tests.trainer.test_export import LORA, checkpoint_of, config_of, trained
from tests.world.cli import Cli


def student_in(folder: Path) -> None:
    """A model's directory, with a tokenizer."""
    model = tiny_model()
    model.generation_config.eos_token_id = 1
    model.save_pretrained(folder)
    Tokenizer(WordLevel({"a": 0, "<eos>": 1}, unk_token="a")).save(str(folder / "tokenizer.json"))
    (folder / "chat_template.jinja").write_text("{{ messages }}")


def run_of(folder: Path, **train: Any) -> Path:
    """A run directory with a checkpoint of step 2 and its model."""
    student_in(folder / "student")
    run_dir = folder / "run"
    (run_dir / "checkpoints").mkdir(parents=True)
    config = config_of(folder / "student", **train)
    data = folder / "none.jsonl"
    data.write_text('{"prompt": "x"}\n')
    config = config.model_copy(
        update={"data": type(config.data).model_validate({"train": str(data)})}
    )
    write_run_format(run_dir)
    (run_dir / "config.yaml").write_text(dump_config(config))
    add_origin(run_dir, ["run", "config.yaml"])
    (run_dir / "summary.json").write_text('{"status": "completed", "eval/a/accuracy": 0.75}')
    learner = trained(config)
    learner.save(str(folder / "student"), str(run_dir / "model"))
    store = Checkpoints(run_dir / "checkpoints", 2)
    part = store.begin(2)
    files = {}
    for file in checkpoint_of(learner, folder / "made").iterdir():
        file.rename(part / file.name)
        files[file.name] = written_file(part / file.name)
    tree = config.model_dump(mode="json", by_alias=True)
    store.commit(part, cut(2), json.dumps({"config": tree, "data": "d1g35t"}), files)
    return run_dir


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return run_of(tmp_path_factory.mktemp("full"))


def test_a_checkpoint_in_float32_is_the_models_weights(run_dir: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    assert main(["export", f"{run_dir}/checkpoints/step_2", str(out), "--dtype", "float32"]) == 0
    found = load_file(out / "model.safetensors")
    expected = load_file(run_dir / "model" / "model.safetensors")
    assert found.keys() == expected.keys()
    assert all(found[name].equal(tensor) for name, tensor in expected.items())
    assert (out / "chat_template.jinja").read_text() == "{{ messages }}"
    assert (out / "generation_config.json").is_file()


def test_a_checkpoint_in_bfloat16_is_rounded(run_dir: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    assert main(["export", f"{run_dir}/checkpoints/step_2", str(out), "--dtype", "bfloat16"]) == 0
    expected = load_file(run_dir / "model" / "model.safetensors")
    for name, tensor in load_file(out / "model.safetensors").items():
        assert tensor.equal(expected[name].bfloat16())
    assert json.loads((out / "config.json").read_text())["dtype"] == "bfloat16"


def test_the_card_shows_the_commit_and_no_metric_twice(run_dir: Path, tmp_path: Path) -> None:
    origin, summary = run_dir / "origin.json", run_dir / "summary.json"
    before = origin.read_text(), summary.read_text()
    (start,) = json.loads(before[0])
    origin.write_text(json.dumps([start | {"commit": "3f" * 20}]))
    metrics = {"eval/a/accuracy": 0.75, "eval/a/mean@1": 0.75, "eval/a/pass@2": 0.9}
    summary.write_text(json.dumps({"status": "completed"} | metrics))
    assert main(["export", str(run_dir), str(tmp_path / "out")]) == 0
    origin.write_text(before[0])
    summary.write_text(before[1])
    card = (tmp_path / "out" / "README.md").read_text()
    assert f"| commit | async\\_opd\\@{'3f' * 20} |" in card
    assert [line for line in card.splitlines() if line.startswith("| eval/")] == [
        "| eval/a/accuracy | 0.75 |",
        "| eval/a/pass\\@2 | 0.9 |",
    ]


def test_the_card_names_student_teachers_data_results_versions_and_no_folder(
    run_dir: Path, tmp_path: Path
) -> None:
    assert main(["export", str(run_dir), str(tmp_path / "out")]) == 0
    card = (tmp_path / "out" / "README.md").read_text()
    rows = [line for line in card.splitlines() if line.startswith("| ")]
    assert "| student | student |" in rows
    assert "| teacher t | student |" in rows
    assert "| data | none.jsonl |" in rows
    assert any("d1g35t" in row for row in rows)
    assert "| eval/a/accuracy | 0.75 |" in rows
    assert any(row.startswith("| torch | ") for row in rows)
    assert "max_tokens: 16" in card
    assert str(run_dir.parent) not in card


@pytest.mark.parametrize(
    ("given", "shown"),
    [
        ("/cache/hub/models--Qwen--Qwen3-8B/snapshots/0f1e", "Qwen/Qwen3-8B@0f1e"),
        ("/home/me/student", "student"),
        ("~/student", "student"),
        ("file:///home/me/rows.jsonl", "rows.jsonl"),
        ("http://10.0.0.7:8000", "…"),
        ("Qwen/Qwen3-8B", "Qwen/Qwen3-8B"),
        ("Answer.\nBriefly.", "Answer.\nBriefly."),
    ],
)
def test_the_cards_config_has_ids_and_no_folder_or_host(given: str, shown: str) -> None:
    assert without_folders({"a": [given]}) == {"a": [shown]}


def test_a_checkpoint_is_named_from_within_the_run(
    run_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(run_dir / "checkpoints")
    assert main(["export", "../checkpoints/step_2", str(tmp_path / "out")]) == 0


def test_adapters_are_written_alone(tmp_path: Path) -> None:
    made = run_of(tmp_path, lora=LORA)
    out = tmp_path / "out"
    assert main(["export", f"{made}/checkpoints/step_2", str(out), "--adapter"]) == 0
    names = {path.name for path in out.iterdir()}
    assert names == {"adapter_config.json", "adapter_model.safetensors", "README.md"}
    assert list(tmp_path.glob(".out*")) == []


@pytest.mark.parametrize(
    ("source", "options", "cause"),
    [
        ("", ["--dtype", "bfloat16"], "model is float32"),
        ("", ["--adapter"], "the run has no adapters"),
        ("model", [], "is neither a run directory nor one of its checkpoints"),
        ("checkpoints/step_3", [], "checkpoints/step_3 does not exist"),
    ],
)
def test_what_cannot_be_exported_is_refused(
    run_dir: Path, tmp_path: Path, cli: Cli, source: str, options: list[str], cause: str
) -> None:
    assert cause in cli("export", run_dir / source, tmp_path / "out", *options, code=2).err
    assert list(tmp_path.iterdir()) == []


def test_a_directory_that_exists_stays_as_it_is(run_dir: Path, tmp_path: Path, cli: Cli) -> None:
    assert "exists already" in cli("export", run_dir, tmp_path, code=2).err


class Hub(BaseHTTPRequestHandler):
    """Takes commits of small files."""

    server: Any

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        self.server.asked.append(self.path)
        if self.path == "/api/repos/create":
            self.server.created = json.loads(body)
            self.answer({"url": f"{self.server.url}/me/student", "name": "me/student"})
        elif "/preupload/" in self.path:
            files = json.loads(body)["files"]
            modes = [
                {"path": one["path"], "uploadMode": "regular", "shouldIgnore": False}
                for one in files
            ]
            self.answer({"files": modes, "commitOid": "a" * 40})
        elif "/commit/" in self.path:
            for line in map(json.loads, body.splitlines()):
                if line["key"] == "file":
                    content = base64.b64decode(line["value"]["content"])
                    self.server.files[line["value"]["path"]] = content
            url = f"{self.server.url}/me/student/commit/{'a' * 40}"
            self.answer({"commitUrl": url, "commitOid": "a" * 40, "success": True})
        else:
            self.answer({"errors": [], "warnings": []})

    def do_GET(self) -> None:
        self.answer({"id": "me/student", "sha": "a" * 40, "siblings": [], "tags": []})

    def answer(self, content: Any) -> None:
        status = self.server.status
        body = json.dumps(content).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: Any) -> None: ...


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    server: Any = ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    server.asked, server.files, server.status = [], {}, 200
    server.url = f"http://127.0.0.1:{server.server_port}"
    monkeypatch.setenv("HF_ENDPOINT", server.url)
    monkeypatch.setenv("HF_TOKEN", "hf_" + "a" * 34)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield server
    server.shutdown()
    thread.join(10)
    server.server_close()


def test_all_files_are_pushed_to_a_private_repository(
    run_dir: Path, tmp_path: Path, hub: Any
) -> None:
    out = tmp_path / "out"
    assert main(["export", str(run_dir), str(out), "--push", "me/student"]) == 0
    assert hub.created["visibility"] == "private"
    assert hub.files == {path.name: path.read_bytes() for path in out.iterdir()}


def test_a_hub_that_refuses_fails_the_command_and_leaves_the_directory(
    run_dir: Path, tmp_path: Path, hub: Any, cli: Cli
) -> None:
    hub.status = 403
    said = cli("export", run_dir, tmp_path / "out", "--push", "me/student", code=1).err
    assert "me/student was not pushed" in said
    assert "403" in said
    assert (tmp_path / "out" / "model.safetensors").is_file()


@pytest.fixture(scope="module")
def mirrored(run_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> str:
    """The URL of the run's mirror, with its checkpoint and its end."""
    url = f"file://{tmp_path_factory.mktemp('bucket')}/runs/a"
    mirror = Mirror(Checkpoints(run_dir / "checkpoints", 2), RunCopies.at(url), 20, 20)
    assert mirror.close(Summary("completed", None, 2, 1.0, run_dir)) is None
    return url


@pytest.mark.parametrize(("at", "local"), [("", ""), ("/step_2", "/checkpoints/step_2")])
def test_a_mirror_is_exported_as_the_run_directory_is(
    run_dir: Path, mirrored: str, tmp_path: Path, at: str, local: str
) -> None:
    assert main(["export", mirrored + at, str(tmp_path / "one")]) == 0
    assert main(["export", f"{run_dir}{local}", str(tmp_path / "other")]) == 0
    names = {path.name for path in (tmp_path / "one").iterdir()}
    assert "model.safetensors" in names
    assert names == {path.name for path in (tmp_path / "other").iterdir()}
    for name in names:
        one, other = (tmp_path / folder / name for folder in ("one", "other"))
        assert one.read_bytes() == other.read_bytes()


def test_the_working_directory_is_exported_as_its_path_is(
    run_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(run_dir)
    assert main(["export", ".", str(tmp_path / "out")]) == 0
    assert (tmp_path / "out" / "model.safetensors").is_file()


def test_a_url_without_a_copy_is_refused(mirrored: str, tmp_path: Path, cli: Cli) -> None:
    printed = cli("export", f"{mirrored}/step_9", tmp_path / "out", code=2)
    assert "step_9 has no complete copy of a run" in printed.err
