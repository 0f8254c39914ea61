"""``async_opd quickstart``: the example's files, copied where they may be changed, and run."""

from __future__ import annotations

import argparse
import contextlib
from collections.abc import Callable
from pathlib import Path

import pytest

from async_opd import cli
from async_opd.checks import resources
from async_opd.config.load import load_config
from async_opd.core.errors import ConfigError
from async_opd.tools.first_steps.command import CONFIG, INPUTS, copy_to, shared_gpus
from tests.world.cli import Cli

ROOT = Path(__file__).parents[3]
EXAMPLE = ROOT / "examples" / "quickstart.yaml"


@pytest.fixture
def quickstart(monkeypatch: pytest.MonkeyPatch) -> Callable[..., argparse.Namespace]:
    """Runs the command; returns the arguments that ``async_opd run`` would get."""

    def runs(*arguments: str) -> argparse.Namespace:
        ran: list[list[str]] = []
        monkeypatch.setattr(cli, "main", lambda words: ran.append(words) or 0)  # type: ignore[func-returns-value]
        given = cli.parser("quickstart").parse_args(["quickstart", *arguments])
        assert given.command(given) == 0
        return cli.parser("run").parse_args(ran[0])

    return runs


def files(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in folder.rglob("*") if p.is_file()}


def test_the_quickstart_runs_a_copy_of_the_example_in_its_directory(
    quickstart: Callable[..., argparse.Namespace], tmp_path: Path
) -> None:
    given = quickstart(str(tmp_path / "first"))
    copied = files(tmp_path / "first")
    assert given.config == str(tmp_path / "first" / "quickstart.yaml")
    assert copied.pop("quickstart.yaml") == EXAMPLE.read_bytes()
    inputs = {
        f"{name}/{path}": content
        for name in INPUTS
        for path, content in files(EXAMPLE.parent / name).items()
    }
    assert copied == inputs
    assert given.run_dir.startswith(str(tmp_path / "first" / "runs" / "quickstart-"))


@pytest.mark.parametrize("link", [".quickstart.partial", "quickstart.yaml"])
def test_nothing_is_written_through_a_link_in_the_directory(link: str, tmp_path: Path) -> None:
    outside, folder = tmp_path / "outside", tmp_path / "here"
    folder.mkdir()
    if link.endswith("partial"):
        outside.mkdir()
    (folder / link).symlink_to(outside)
    with contextlib.suppress(OSError):
        copy_to(folder)
    assert not outside.exists() or list(outside.iterdir()) == []


def test_its_pools_share_the_gpus_of_a_machine_that_has_fewer_than_four(
    quickstart: Callable[..., argparse.Namespace], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(resources, "gpu_count", lambda: 1)
    given = quickstart(str(tmp_path))
    shared = load_config(given.config, given.set)
    assert sum(pool.gpus for pool in resources.pools(shared)) == 1


def test_it_places_no_pools_where_the_user_does(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resources, "gpu_count", lambda: 1)
    assert shared_gpus(EXAMPLE, ["name=placement"]) != []
    assert shared_gpus(EXAMPLE, ["rollout.placement=dedicated"]) == []


@pytest.mark.parametrize("gpus", [0, 4])
def test_its_pools_share_no_gpus_where_there_are_enough_or_none(
    gpus: int,
    quickstart: Callable[..., argparse.Namespace],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(resources, "gpu_count", lambda: gpus)
    assert quickstart(str(tmp_path)).set == []


def test_the_copy_is_the_same_run_as_the_example(tmp_path: Path) -> None:
    copy_to(tmp_path)
    of, here = (load_config(path).model_dump() for path in (EXAMPLE, tmp_path / CONFIG))
    assert {key for key in of if of[key] != here[key]} == {"student", "teachers", "data"}  # paths


def test_what_the_user_changed_is_kept(
    quickstart: Callable[..., argparse.Namespace], tmp_path: Path
) -> None:
    copy_to(tmp_path)
    (tmp_path / CONFIG).write_text("mine")
    quickstart(str(tmp_path))
    assert (tmp_path / CONFIG).read_text() == "mine"


@pytest.mark.parametrize("options", [[], ["--dry-run"]])
def test_a_config_that_the_command_did_not_write_is_run_only_where_its_directory_is_named(
    quickstart: Callable[..., argparse.Namespace],
    options: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    copy_to(tmp_path)
    (tmp_path / CONFIG).write_text("theirs")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match=r"name its directory: async_opd quickstart \."):
        quickstart(*options)
    assert quickstart(".", *options).config == str(tmp_path / CONFIG)


def test_a_link_is_no_config_that_the_command_wrote(
    quickstart: Callable[..., argparse.Namespace], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    copy_to(tmp_path)
    (tmp_path / CONFIG).rename(tmp_path / "other.yaml")
    (tmp_path / CONFIG).symlink_to("other.yaml")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match="is not the one of this version"):
        quickstart()


def test_the_command_runs_twice_in_a_directory_and_names_the_file(
    quickstart: Callable[..., argparse.Namespace],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    first, second = quickstart(), quickstart()
    assert first.config == second.config == str(tmp_path / CONFIG)
    assert "runs quickstart.yaml, which is there already" in capsys.readouterr().out


def test_another_folder_of_the_name_is_not_written_into(tmp_path: Path) -> None:
    (tmp_path / "quickstart").mkdir()
    with pytest.raises(ConfigError, match="name another directory"):
        copy_to(tmp_path)


@pytest.mark.parametrize(
    ("folder", "cause"),
    [
        ("train.steps=7", "--set train.steps=7"),
        ("file", "is not a directory"),
        ("lacking", "exists, but quickstart.yaml beside it does not"),
    ],
)
@pytest.mark.parametrize("options", [[], ["--dry-run"]])
def test_a_dry_run_refuses_the_directories_that_a_run_refuses(
    folder: str,
    cause: str,
    options: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    cli: Cli,
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").touch()
    (tmp_path / "lacking" / "quickstart").mkdir(parents=True)
    assert cause in cli("quickstart", folder, *options, code=2).err


def test_a_copy_that_was_interrupted_is_made_again(tmp_path: Path) -> None:
    (tmp_path / ".quickstart.partial" / "models").mkdir(parents=True)
    copy_to(tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["quickstart", "quickstart.yaml"]


def test_a_dry_run_of_the_quickstart_checks_and_writes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cli: Cli
) -> None:
    monkeypatch.chdir(tmp_path)
    assert "steps: 7\n" in cli("quickstart", "new", "--dry-run", "--set", "train.steps=7").out
    assert list(tmp_path.iterdir()) == []
