"""A local Ray cluster whose processes are too slow is started again; ray.init is a fake."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import ray

from async_opd.cluster import session
from async_opd.cluster.session import SLOW_AGENT, STARTS, TOO_SLOW, ray_session
from async_opd.config.load import load_config
from async_opd.config.run_config import RunConfig
from async_opd.core.errors import StageError

EXAMPLE = Path(__file__).parents[2] / "examples" / "quickstart.yaml"


AGENT = "/tmp/ray/metrics_agent_port_1"
SAID = f"[now C 7 7] (raylet) a.cc:1: A bug. Check failed: it.has_value() {SLOW_AGENT} {AGENT}"


class Init:
    """Fails with these errors, one after the other, and then works; notes Ray's directories.

    ``raylet`` is what each start's raylet has written.
    """

    def __init__(self, *errors: Exception) -> None:
        self.errors, self.folders, self.raylet = list(errors), list[Path](), ""

    def __call__(self, **given: Any) -> None:
        self.folders.append(Path(given["_temp_dir"]).parent)
        logs = Path(given["_temp_dir"]) / "session_latest" / "logs"
        logs.mkdir(parents=True)
        (logs / "raylet.err").write_text(f"a warning\n{self.raylet}\n  a stack\n")
        if self.errors:
            raise self.errors.pop(0)


class Clock:
    """Thirty seconds pass from one look at it to the next."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        self.now += 30
        return self.now


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


async def test_starts_with_a_slow_agent_go_on_while_one_more_fits_into_the_bound(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    init = fails(monkeypatch, *[slow() for _ in range(100)])
    init.raylet = SAID
    monkeypatch.setattr(session, "monotonic", Clock())
    bounded = load_config(EXAMPLE, [f"run_dir={tmp_path}", "timeouts.engine_start_s=420"])
    with pytest.raises(StageError, match="Ray's processes did not start in time"):
        async with ray_session(bounded):
            pass
    # The first start is over 60 s after the first look at the clock, and each other 60 s later.
    assert len(init.folders) == 7


async def test_a_start_with_a_slow_agent_says_what_the_raylet_has_waited_for(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    init = fails(monkeypatch, slow())
    init.raylet = SAID
    async with ray_session(config(tmp_path)):
        pass
    assert f"has_value() {SLOW_AGENT} {AGENT}" in capsys.readouterr().err
