"""A local Ray cluster whose processes are too slow is started again; ray.init is a fake."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import ray

from async_opd.cluster.session import STARTS, TOO_SLOW, ray_session
from async_opd.config.load import load_config
from async_opd.config.run_config import RunConfig
from async_opd.core.errors import StageError

EXAMPLE = Path(__file__).parents[2] / "examples" / "quickstart.yaml"


class Init:
    """Fails with these errors, one after the other, and then works; notes Ray's directories."""

    def __init__(self, *errors: Exception) -> None:
        self.errors, self.folders = list(errors), list[Path]()

    def __call__(self, **given: Any) -> None:
        self.folders.append(Path(given["_temp_dir"]).parent)
        if self.errors:
            raise self.errors.pop(0)


def slow() -> Exception:
    return Exception(f"The current node {TOO_SLOW}. This could happen because …")


def fails(monkeypatch: pytest.MonkeyPatch, *errors: Exception) -> Init:
    init = Init(*errors)
    monkeypatch.setattr(ray, "init", init)
    monkeypatch.setattr(ray, "shutdown", lambda: None)
    return init


def config(tmp_path: Path) -> RunConfig:
    return load_config(EXAMPLE, [f"run_dir={tmp_path}"])


async def test_a_cluster_that_was_too_slow_is_started_again_in_another_directory(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    init = fails(monkeypatch, slow())
    async with ray_session(config(tmp_path)) as reaper:
        assert reaper is not None
        first, second = init.folders
        assert (first.exists(), second.exists()) == (False, True)
        assert os.environ["RAY_AUTH_TOKEN_PATH"] == str(second / "token")
    assert "Ray is started again" in capsys.readouterr().err
    assert not second.exists()


async def test_a_cluster_that_stays_too_slow_is_an_error_with_the_cause(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    init = fails(monkeypatch, *[slow() for _ in range(STARTS)])
    with pytest.raises(StageError, match="is the machine overloaded"):
        async with ray_session(config(tmp_path)):
            pass
    assert len(init.folders) == STARTS
    assert not any(folder.exists() for folder in init.folders)


async def test_another_error_of_ray_is_not_tried_again(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    init = fails(monkeypatch, RuntimeError("no"), slow())
    with pytest.raises(StageError, match="RuntimeError: no"):
        async with ray_session(config(tmp_path)):
            pass
    assert len(init.folders) == 1
