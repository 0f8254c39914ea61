"""A local Ray cluster whose processes are too slow is started again; ray.init is a fake."""

from __future__ import annotations

import os
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import ray

from async_opd.cluster import session
from async_opd.cluster.launch import launch
from async_opd.cluster.launch_parts import launch_evaluators
from async_opd.cluster.session import SLOW_AGENT, STARTS, TOO_SLOW, ray_session
from async_opd.config.load import load_config
from async_opd.config.run_config import RunConfig
from async_opd.config.sections.cluster import ClusterConfig
from async_opd.core.errors import AsyncOPDError, ConfigError, StageError

EXAMPLE = Path(__file__).parents[2] / "examples" / "quickstart.yaml"


AGENT = "/tmp/ray/metrics_agent_port_1"
WORDS = f"{SLOW_AGENT} {AGENT}"
LOGGED = f"[now C 7 7] (raylet) a.cc:1: A bug. Check failed: statussetor3576.has_value() {WORDS}"


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
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    init, lines = fails(monkeypatch, slow()), list[str]()
    async with ray_session(config(tmp_path), lines.append) as reaper:
        assert reaper is not None
        first, second = init.folders
        assert (first.exists(), second.exists()) == (False, True)
        assert os.environ["RAY_AUTH_TOKEN_PATH"] == str(second / "token")
    assert [line.partition(":")[0] for line in lines] == ["Ray is started again"]
    assert not second.exists()


async def test_a_cluster_that_stays_too_slow_is_an_error_with_the_cause(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    init = fails(monkeypatch, *[slow() for _ in range(STARTS)])
    with pytest.raises(StageError, match="is the machine overloaded"):
        async with ray_session(config(tmp_path), print):
            pass
    assert len(init.folders) == STARTS
    assert not any(folder.exists() for folder in init.folders)


async def test_another_error_of_ray_is_not_tried_again(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    init = fails(monkeypatch, RuntimeError("no"), slow())
    with pytest.raises(StageError, match="RuntimeError: no"):
        async with ray_session(config(tmp_path), print):
            pass
    assert len(init.folders) == 1


@pytest.mark.slow
async def test_starts_with_a_slow_agent_go_on_while_one_more_fits_into_the_bound(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    init = fails(monkeypatch, *[slow() for _ in range(100)])
    init.raylet = LOGGED
    monkeypatch.setattr(session, "monotonic", count(30, 30).__next__)
    bounded = load_config(EXAMPLE, [f"run_dir={tmp_path}", "timeouts.engine_start_s=420"])
    with pytest.raises(StageError, match="Ray's processes did not start in time"):
        async with ray_session(bounded, print):
            pass
    # The first start is over 60 s after the first look at the clock, and each other 60 s later.
    assert len(init.folders) == 7


async def test_a_start_with_a_slow_agent_says_what_the_raylet_has_waited_for(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Without the expression of C++ in front of it."""
    init, lines = fails(monkeypatch, slow()), list[str]()
    init.raylet = LOGGED
    async with ray_session(config(tmp_path), lines.append):
        pass
    cause = f"Ray's processes did not start in time ({WORDS})"
    assert lines == [f"Ray is started again: {cause}: is the machine overloaded?"]


async def test_a_launch_passes_on_that_ray_is_started_again(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    fails(monkeypatch, slow(), RuntimeError("no"))
    lines = list[str]()
    with pytest.raises(StageError):
        async with launch(config(tmp_path), device="cpu", eos_ids=(), notify=lines.append):
            pass
    assert [line for line in lines if line.startswith("Ray is started again")]


async def addressed(monkeypatch: pytest.MonkeyPatch, config: RunConfig, error: Exception) -> Any:
    """The address at which Ray is started, and the error of the launch."""
    given: list[Any] = []

    def init(**named: Any) -> None:
        given.append(named["address"])
        raise error

    monkeypatch.setattr(ray, "init", init)
    monkeypatch.setattr(ray, "shutdown", lambda: None)
    with pytest.raises(AsyncOPDError) as failed:
        async with launch_evaluators(config, device="cpu", eos_ids=()):
            pass
    return given, failed.value


async def test_a_run_joins_the_cluster_of_ray_address(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """As in a job, whose head node would otherwise start a second Ray."""
    monkeypatch.setenv("RAY_ADDRESS", "10.0.0.1:6379")
    given, error = await addressed(monkeypatch, config(tmp_path), ConnectionError("none"))
    assert given == ["10.0.0.1:6379"]
    assert "no Ray cluster at '10.0.0.1:6379'" in str(error)


async def test_the_address_of_the_config_comes_before_that_of_the_environment(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("RAY_ADDRESS", "10.0.0.1:6379")
    given = load_config(EXAMPLE, [f"run_dir={tmp_path}", "cluster.address=10.0.0.2:6379"])
    found, _ = await addressed(monkeypatch, given, ConnectionError("none"))
    assert found == ["10.0.0.2:6379"]
    assert ClusterConfig(address="local").joins is None


async def test_a_client_in_ray_address_is_refused_before_ray_starts(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("RAY_ADDRESS", "ray://head:10001")
    given, error = await addressed(monkeypatch, config(tmp_path), ConnectionError("none"))
    assert given == []
    assert isinstance(error, ConfigError)
    assert "ray job submit" in str(error)


async def test_a_runtime_env_that_conflicts_with_that_of_the_job_is_an_error_of_ours(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("RAY_ADDRESS", "10.0.0.1:6379")
    conflict = ValueError("Failed to merge the Job's runtime env")
    _, error = await addressed(monkeypatch, config(tmp_path), conflict)
    assert isinstance(error, StageError)
    assert "Failed to merge" in error.cause
    assert "runtime_env" in error.remedy
