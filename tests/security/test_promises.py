"""docs/security.md's promises: no pickle of strangers, no code of models, Ray's token stays."""

from __future__ import annotations

import ast
import asyncio
import json
import os
import pickle
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from async_opd.checks.preflight import preflight
from async_opd.cluster.session import ray_session
from async_opd.config.load import load_config
from async_opd.config.run_config import RunConfig
from async_opd.config.sections.engine import EngineConfig
from async_opd.core.errors import ConfigError, StageError
from async_opd.models.engine_args import engine_kwargs

ROOT = Path(__file__).parents[2]
PACKAGES = ("async_opd", "rollouter", "teachers", "trainer")
EXAMPLE = ROOT / "examples" / "quickstart.yaml"
STUDENT = ROOT / "examples" / "quickstart" / "models" / "student"

UNPICKLERS = {
    "async_opd/core/batch.py",  # the queue's messages are from our own processes
    "async_opd/processes/in_user_process.py",  # asked over a socket that only its starter holds
    "async_opd/data/stored_rows.py",  # a file without a name, which this process has written
}


def sources(*words: str, below: tuple[str, ...] = ("",)) -> Iterator[tuple[str, ast.Module]]:
    """Every file of ours that has one of the words, and a name that begins so."""
    for path in (path for package in PACKAGES for path in (ROOT / package).rglob("*.py")):
        file, text = str(path.relative_to(ROOT)), path.read_text(encoding="utf-8")
        if file.startswith(below) and any(word in text for word in words):
            yield file, ast.parse(text)


def calls(*functions: str) -> Iterator[tuple[str, ast.Call]]:
    """The calls of some functions, and their files."""
    for file, tree in sources(*(name.rpartition(".")[2] for name in functions)):
        for node in ast.walk(tree):
            if isinstance(node, ast.Call) and ast.unparse(node.func) in functions:
                yield file, node


@pytest.mark.slow
def test_nothing_is_unpickled_but_what_our_own_processes_sent() -> None:
    readers = ("pickle.load", "pickle.loads", "pickle.Unpickler", "dill.load", "joblib.load")
    assert {file for file, _ in calls(*readers)} <= UNPICKLERS


def test_torch_loads_weights_only() -> None:
    for file, call in calls("torch.load"):
        given = {word.arg: ast.unparse(word.value) for word in call.keywords}
        assert given.get("weights_only") == "True", file


def test_no_text_is_executed() -> None:
    assert [file for file, _ in calls("eval", "exec")] == []


class Bomb:
    """Unpickling it makes a directory."""

    def __init__(self, target: Path) -> None:
        self.target = target

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.target),)


@pytest.fixture
def bombed(tmp_path: Path) -> Path:
    """A model whose weights are a pickle that does something."""
    model = tmp_path / "model"
    shutil.copytree(STUDENT, model)
    (model / "model.safetensors").unlink()
    (model / "pytorch_model.bin").write_bytes(pickle.dumps(Bomb(tmp_path / "exploded")))
    return model


def with_student(model: Path) -> RunConfig:
    return load_config(EXAMPLE, [f"student.model={model}"])


def test_a_model_whose_weights_are_a_pickle_is_refused(bombed: Path, tmp_path: Path) -> None:
    found = preflight(with_student(bombed), "c.yaml", 0).problems
    assert any("has no *.safetensors" in problem.message for problem in found)
    assert not (tmp_path / "exploded").exists()


def test_the_trainer_reads_no_pickle_although_one_is_there(bombed: Path, tmp_path: Path) -> None:
    import torch

    from tests.trainer.models import load_student

    shutil.copyfile(STUDENT / "model.safetensors", bombed / "adapter.safetensors")
    with pytest.raises(StageError, match="safetensors"):
        load_student(with_student(bombed), torch.device("cpu"))
    assert not (tmp_path / "exploded").exists()


def test_the_trainer_runs_no_code_of_a_model(bombed: Path, tmp_path: Path) -> None:
    import torch

    from tests.trainer.models import load_student

    classes = {"AutoConfig": "code.C", "AutoModelForCausalLM": "code.M"}
    config = {"model_type": "mine", "auto_map": classes}
    (bombed / "config.json").write_text(json.dumps(config))
    (bombed / "code.py").write_text(f"import os; os.mkdir({str(tmp_path / 'exploded')!r})")
    with pytest.raises(StageError, match="contains custom code"):
        load_student(with_student(bombed), torch.device("cpu"))
    assert not (tmp_path / "exploded").exists()


def test_code_of_models_is_off_unless_asked_for() -> None:
    config = load_config(EXAMPLE)
    assert not config.student.trust_remote_code
    assert not any(teacher.trust_remote_code for teacher in config.teachers.values())


@pytest.mark.parametrize("trusted", [True, False])
def test_engines_get_the_configured_trust(trusted: bool) -> None:
    arguments = engine_kwargs(
        EngineConfig(),
        model="m",
        device="cpu",
        tensor_parallel=1,
        seed=0,
        trust_remote_code=trusted,
    )
    assert (arguments["trust_remote_code"], arguments["load_format"]) == (trusted, "safetensors")


def test_code_of_models_cannot_be_asked_for_in_passing() -> None:
    with pytest.raises(ConfigError, match="it is a key of the student's or the teacher's section"):
        load_config(EXAMPLE, ["rollout.engine.extra={trust_remote_code: true}"])


def test_rays_token_authentication_is_left_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    import ray

    seen: list[dict[str, Any]] = []
    monkeypatch.delenv("RAY_AUTH_MODE", raising=False)
    monkeypatch.setattr(ray, "init", lambda **arguments: seen.append(arguments))
    monkeypatch.setattr(ray, "shutdown", lambda: None)

    async def session() -> str | None:
        async with ray_session(load_config(EXAMPLE), print):
            return os.environ.get("RAY_AUTH_MODE")

    assert asyncio.run(session()) is None
    assert "_system_config" not in seen[0]


def test_nothing_of_ours_turns_rays_authentication_off() -> None:
    for file, tree in sources("AUTH_MODE"):
        names = [node.value for node in ast.walk(tree) if isinstance(node, ast.Constant)]
        assert not {"RAY_AUTH_MODE", "AUTH_MODE"} & set(map(str, names)), file


@pytest.mark.parametrize("trusted", [True, False])
def test_code_of_models_is_downloaded_only_where_it_is_asked_for(
    monkeypatch: pytest.MonkeyPatch, trusted: bool
) -> None:
    import huggingface_hub

    from async_opd.models.hub import localize

    asked: dict[str, list[str]] = {}

    def download(model: str, revision: str | None, allow_patterns: list[str]) -> str:
        asked[model] = allow_patterns
        return str(STUDENT)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    commit = "0" * 39 + "a"
    overrides = [f"student={{model: a/student, trust_remote_code: {trusted}, revision: {commit}}}"]
    localize(load_config(EXAMPLE, overrides), "c.yaml")
    assert ("*.py" in asked["a/student"]) == trusted
