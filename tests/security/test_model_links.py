"""Links in a model directory: no file from elsewhere gets into the trained model."""

from __future__ import annotations

import os
import shutil
import warnings
from pathlib import Path

import pytest
import torch

from async_opd.models.lm_head import HeadFiles
from async_opd.models.model_files import ModelError
from async_opd.models.model_size import ModelSize
from async_opd.models.own_files import foreign
from tests.fuzz.command import STUDENT, Said, command, good, written
from tests.trainer.models import tiny_model
from trainer.saving.export import save_model

SECRET = "hf_not_yours"


@pytest.fixture
def secret(tmp_path: Path) -> Path:
    """A file, in a folder, that is not a model's."""
    folder = tmp_path / "home"
    folder.mkdir()
    (folder / "secret.jinja").write_text(SECRET)
    return folder / "secret.jinja"


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A downloaded model."""
    return Path(shutil.copytree(STUDENT, tmp_path / "downloaded"))


def checked(folder: Path, model: Path) -> Said:
    return command("check", str(written(folder, good(folder))), f"student.model={model}")


def exported(model: Path, folder: Path) -> dict[str, str]:
    """Files of a trained model's directory, and what is in them."""
    save_model(tiny_model(0), str(model), str(folder / "model"), [("w", torch.zeros(1))])
    files = (file for file in (folder / "model").rglob("*") if file.is_file())
    return {
        str(file.relative_to(folder / "model")): file.read_text(errors="replace") for file in files
    }


LINKS = ["README.txt", "generation_config.json", "additional_chat_templates/rag.jinja"]


@pytest.mark.parametrize("name", LINKS)
def test_what_a_link_names_elsewhere_is_not_exported(
    tmp_path: Path, model: Path, secret: Path, name: str
) -> None:
    link = model / name
    link.parent.mkdir(exist_ok=True)
    link.unlink(missing_ok=True)
    link.symlink_to(secret)
    with pytest.warns(UserWarning, match=name):
        files = exported(model, tmp_path)
    assert not [file for file, text in files.items() if SECRET in text]


def test_templates_in_a_folder_elsewhere_are_not_exported(
    tmp_path: Path, model: Path, secret: Path
) -> None:
    (model / "additional_chat_templates").symlink_to(secret.parent)
    with pytest.warns(UserWarning, match="additional_chat_templates"):
        files = exported(model, tmp_path)
    assert not [file for file, text in files.items() if SECRET in text]


def test_the_environment_of_the_trainer_is_not_exported(tmp_path: Path, model: Path) -> None:
    (model / "README.txt").symlink_to("/proc/self/environ")
    with pytest.warns(UserWarning, match=r"README\.txt"):
        assert "README.txt" not in exported(model, tmp_path)


@pytest.mark.parametrize("name", [*LINKS, "config.json", "tokenizer_config.json"])
def test_check_refuses_a_student_with_a_file_from_elsewhere(
    tmp_path: Path, model: Path, secret: Path, name: str
) -> None:
    link = model / name
    link.parent.mkdir(exist_ok=True)
    if link.exists():
        shutil.move(link, secret)
    link.symlink_to(secret)
    said = checked(tmp_path, model)
    assert said.code == 2
    assert f"{link} is a link to {secret}" in said.err


@pytest.mark.parametrize("name", ["qformer_tokenizer", ".a/b", "additional_chat_templates"])
def test_check_refuses_a_link_to_a_folder_of_the_model_too(
    tmp_path: Path, model: Path, name: str
) -> None:
    (model / ".a").mkdir()
    (model / name).symlink_to(model / ".a")
    said = checked(tmp_path, model)
    assert said.code == 2
    assert f"{model / name} is a link to {model / '.a'}, a folder" in said.err


@pytest.mark.parametrize(
    "section", ["", "kind: endpoint, urls: ['http://127.0.0.1:9'], served_model: m, "]
)
def test_check_refuses_a_teacher_with_a_file_from_elsewhere(
    tmp_path: Path, secret: Path, section: str
) -> None:
    teacher = tmp_path / "teacher"
    shutil.copytree(STUDENT.parent / "teacher-sort", teacher)
    (teacher / "chat_template.jinja").symlink_to(secret)
    given = f"teachers.sort={{{section}model: {teacher}, own_template: true}}"
    said = command("check", str(written(tmp_path, good(tmp_path))), given)
    assert said.code == 2
    assert f"chat_template.jinja is a link to {secret}" in said.err


def test_hidden_files_of_the_directory_are_not_exported_under_another_name(
    tmp_path: Path, model: Path
) -> None:
    (model / ".git").mkdir()
    (model / ".git" / "config").write_text(SECRET)
    (model / "README.txt").symlink_to(".git/config")
    assert checked(tmp_path, model).code == 2
    with pytest.warns(UserWarning, match=r"README\.txt"):
        assert "README.txt" not in exported(model, tmp_path)


def cached(folder: Path) -> Path:
    """The quickstart's student as the hub's client keeps it, every file a link."""
    repository = folder / "hub" / "models--a--student"
    snapshot = repository / "snapshots" / ("0" * 40)
    (repository / "blobs").mkdir(parents=True)
    (snapshot / "additional_chat_templates").mkdir(parents=True)
    for number, file in enumerate(sorted(STUDENT.iterdir())):
        shutil.copyfile(file, repository / "blobs" / str(number))
        (snapshot / file.name).symlink_to(f"../../blobs/{number}")
    (repository / "blobs" / "rag").write_text("x")
    template = snapshot / "additional_chat_templates" / "rag.jinja"
    template.symlink_to("../../../blobs/rag")
    return snapshot


def test_a_model_of_the_hubs_cache_is_exported_whole(tmp_path: Path) -> None:
    snapshot = cached(tmp_path)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        assert checked(tmp_path, snapshot).code == 0
        files = exported(snapshot, tmp_path)
    garbage = ResourceWarning, RuntimeWarning  # of objects that earlier tests left to the collector
    assert [one.message for one in caught if not issubclass(one.category, garbage)] == []
    assert {"tokenizer.json", "additional_chat_templates/rag.jinja"} <= files.keys()
    assert files["tokenizer.json"] == (STUDENT / "tokenizer.json").read_text()


def test_blobs_of_another_repository_are_not_a_models_own(tmp_path: Path, secret: Path) -> None:
    snapshot = cached(tmp_path)
    other = tmp_path / "hub" / "models--a--private" / "blobs"
    other.mkdir(parents=True)
    (other / "0").write_text(SECRET)
    (snapshot / "README.txt").symlink_to("../../../models--a--private/blobs/0")
    assert foreign(snapshot) == [snapshot / "README.txt"]


def test_weights_may_lie_elsewhere_and_links_stay_inside(tmp_path: Path, model: Path) -> None:
    shutil.move(model / "model.safetensors", tmp_path / "base.safetensors")
    (model / "model.safetensors").symlink_to(tmp_path / "base.safetensors")
    (model / "LICENSE.txt").write_text("free")
    (model / "COPYING.txt").symlink_to("LICENSE.txt")
    assert checked(tmp_path, model).code == 0
    assert exported(model, tmp_path)["COPYING.txt"] == "free"


@pytest.mark.parametrize("name", ["model.safetensors", "adapter.safetensors"])
def test_a_pipe_among_the_weights_is_refused_and_not_waited_for(
    tmp_path: Path, model: Path, name: str
) -> None:
    (model / name).unlink(missing_ok=True)
    os.mkfifo(model / name)
    pipe = os.open(model / name, os.O_RDWR)  # so that a reader would not wait here
    said = checked(tmp_path, model)
    os.close(pipe)
    assert said.code == 2
    assert f"{model / name} is not a regular file" in said.err
    assert "No such device" not in said.err  # nor does a reader of sizes open it
    with pytest.raises(ModelError, match="is not a regular file"):
        ModelSize.read(model)
    with pytest.raises(ModelError, match="is not a regular file"):
        HeadFiles.read(model)


def test_a_link_to_the_model_is_as_good_as_the_model(tmp_path: Path, model: Path) -> None:
    (tmp_path / "link").symlink_to(model)
    assert checked(tmp_path, tmp_path / "link").code == 0
    assert "tokenizer.json" in exported(tmp_path / "link", tmp_path)
