"""Which nodes are asked, and what becomes of their answers, without a cluster."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import ray

from async_opd.checks import nodes
from async_opd.checks.nodes import NodeReport
from async_opd.cluster import node_checks
from async_opd.cluster.node_checks import check_nodes
from async_opd.config.run_config import RunConfig
from async_opd.core.errors import ConfigError, StageTimeout


def config(run_dir: Path, address: str | None = "auto") -> RunConfig:
    return RunConfig.model_validate(
        {
            "student": {"model": "none"},
            "teachers": {"t": {"model": "none"}},
            "data": {"train": "prompts.jsonl"},
            "run_dir": str(run_dir),
            "cluster": {"address": address},
        }
    )


@pytest.fixture
def alive(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    """Sets the number of living nodes; one more is dead."""

    def nodes(count: int) -> None:
        found = [
            {
                "NodeID": "0" * 55 + str(index),
                "Alive": index < count,
                "NodeManagerHostname": f"n{index}",
                "NodeManagerAddress": "10.0.0.1",
                "Resources": {},
            }
            for index in range(count + 1)
        ]
        monkeypatch.setattr(ray, "nodes", lambda: found)

    return nodes


async def late(ask: Any, timeout_s: float) -> NodeReport:
    raise StageTimeout("node", "a report took longer than 600 s")


@pytest.mark.parametrize(("count", "address"), [(1, "auto"), (2, None)])
async def test_neither_a_single_node_nor_a_local_run_is_asked(
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    alive: Callable[[int], None],
    count: int,
    address: str | None,
) -> None:
    alive(count)
    monkeypatch.setattr(node_checks, "_answer", late)
    await check_nodes(config(tmp_path, address), "cpu")


async def test_every_living_node_that_does_not_answer_is_named(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, alive: Callable[[int], None]
) -> None:
    alive(2)
    monkeypatch.setattr(node_checks, "_answer", late)
    with pytest.raises(ConfigError) as refused:
        await check_nodes(config(tmp_path), "cpu")
    assert [problem.message for problem in refused.value.problems] == [
        f"{name} (10.0.0.1): no report: a report took longer than 600 s" for name in ("n0", "n1")
    ]


async def test_the_drivers_file_is_in_the_run_directory_only_while_nodes_look_for_it(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, alive: Callable[[int], None]
) -> None:
    seen: list[list[str]] = []

    async def answer(ask: Any, timeout_s: float) -> NodeReport:
        _, probe, _ = ask.args
        seen.append(os.listdir(tmp_path))
        assert seen[-1] == [probe.name]
        raise StageTimeout("node", "late")

    alive(2)
    monkeypatch.setattr(node_checks, "_answer", answer)
    with pytest.raises(ConfigError):
        await check_nodes(config(tmp_path), "cpu")
    assert len(seen) == 2
    assert os.listdir(tmp_path) == []


async def test_nodes_look_for_the_run_directory_by_its_absolute_path(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, alive: Callable[[int], None]
) -> None:
    """A process on a node has another working directory than the driver."""

    async def answer(ask: Any, timeout_s: float) -> NodeReport:
        name, probe, gpus = ask.args
        with monkeypatch.context() as patch:
            patch.chdir("/")
            return nodes.report(name, probe, gpus)

    alive(2)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(node_checks, "_answer", answer)
    await check_nodes(config(Path("runs/r")), "cpu")
