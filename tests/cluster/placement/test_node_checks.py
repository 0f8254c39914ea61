"""Which nodes are asked, and what becomes of their answers, without a cluster."""

from __future__ import annotations

import os
import pickle
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import ray

from async_opd.checks import nodes
from async_opd.checks.nodes import NodeReport
from async_opd.cluster import actor_names
from async_opd.cluster.actor_factory import ActorFactory, Factories
from async_opd.cluster.placement import node_checks
from async_opd.cluster.placement.node_checks import ComparedNodes, check_nodes
from async_opd.cluster.remote import Remote
from async_opd.config.run_config import RunConfig
from async_opd.core.errors import ConfigError, EngineStartError, StageTimeout
from tests.world.config import run_config
from tests.world.processes import FakeHandle

ID = "0" * 55 + "{}"


def config(run_dir: Path, address: str | None = "auto") -> RunConfig:
    return run_config(run_dir=str(run_dir), cluster={"address": address})


@pytest.fixture
def alive(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    """Sets the number of living nodes; one more is dead."""

    def nodes(count: int) -> None:
        found = [
            {
                "NodeID": ID.format(index),
                "Alive": index < count,
                "NodeManagerHostname": f"n{index}",
                "NodeManagerAddress": "127.0.0.1",
                "Resources": {},
            }
            for index in range(count + 1)
        ]
        monkeypatch.setattr(ray, "nodes", lambda: found)

    return nodes


async def late(ask: Any, timeout_s: float) -> NodeReport:
    raise StageTimeout("node", "a report took longer than 600 s")


async def test_a_local_run_asks_no_node(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, alive: Callable[[int], None]
) -> None:
    alive(2)
    monkeypatch.setattr(node_checks, "_answer", late)
    assert await check_nodes(config(tmp_path, None), "cpu") is None


async def test_a_node_that_joins_later_is_compared_before_a_process_is_built_on_it(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, alive: Callable[[int], None]
) -> None:
    asked: list[str] = []
    other: dict[str, str] = {}

    async def answer(ask: Any, timeout_s: float) -> NodeReport:
        name, probe, gpus = ask.args
        asked.append(name)
        with monkeypatch.context() as patch:
            patch.chdir("/")  # a process on a node has another working directory than the driver
            found = nodes.report(name, probe, gpus)
        return replace(found, versions={**found.versions, **other})

    alive(1)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(node_checks, "_answer", answer)
    compared = await check_nodes(config(Path("run")), "cpu")
    assert compared is not None
    alive(2)
    handle: Any = FakeHandle(ID.format(1))
    remote = Remote("student/0", handle, 5)
    remote.compare_node = pickle.loads(pickle.dumps(compared)).compare
    monkeypatch.chdir("/")  # as the scoring stage, which rebuilds teachers
    other["ray"] = "0.1"
    with pytest.raises(EngineStartError, match=r"its node differs: .*0.1 on n1") as refused:
        await remote.build("module:made", (), 5)
    assert (handle.built, "install the same" in refused.value.remedy) == (0, True)
    other.clear()
    for built in (1, 2):
        await remote.build("module:made", (), 5)
        assert handle.built == built
    assert asked == [f"{name} (127.0.0.1)" for name in ("n0", "n1", "n1")]
    assert os.listdir(tmp_path / "run") == []


async def test_every_process_of_a_run_compares_its_node(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Remote, "create", lambda name, **named: Remote(name, None, 5))
    joined = config(Path("r"))
    compared = ComparedNodes(joined, "cpu", NodeReport("the driver"))
    factory = ActorFactory(joined, "cpu", (), Factories(), print, compare_node=compared.compare)
    remote = await factory.create(actor_names.QUEUE)
    assert remote.compare_node == compared.compare


@pytest.mark.parametrize("count", [1, 2])
async def test_every_living_node_that_does_not_answer_is_named_also_a_single_one(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, alive: Callable[[int], None], count: int
) -> None:
    """The driver may be elsewhere, as in a container without the node's folders."""
    probes: list[str] = []

    async def answer(ask: Any, timeout_s: float) -> NodeReport:
        _, probe, _ = ask.args
        assert os.listdir(tmp_path) == [probe.name]  # the driver's file, while nodes look for it
        probes.append(probe.name)
        return await late(ask, timeout_s)

    alive(count)
    monkeypatch.setattr(node_checks, "_answer", answer)
    with pytest.raises(ConfigError) as refused:
        await check_nodes(config(tmp_path), "cpu")
    assert [problem.message for problem in refused.value.problems] == [
        f"n{at} (127.0.0.1): no report: a report took longer than 600 s" for at in range(count)
    ]
    assert (len(probes), os.listdir(tmp_path)) == (count, [])


async def test_nodes_import_what_replicas_and_ranks_do_but_the_driver_and_a_check_nothing(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, alive: Callable[[int], None]
) -> None:
    probes: list[nodes.Probe] = []

    async def answer(ask: Any, timeout_s: float) -> NodeReport:
        probes.append(ask.args[1])
        return await late(ask, timeout_s)

    alive(1)
    monkeypatch.setattr(node_checks, "_answer", answer)
    monkeypatch.setattr(nodes, "loading_fault", pytest.fail)  # of the driver's own report
    given = run_config(
        run_dir=str(tmp_path),
        cluster={"address": "auto", "env": {"NCCL_ALGO": "Ring"}},
        loss={"kind": "user", "function": "m:loss"},
        reward={"grader": "m:grade"},
        rollout={"n": 4},
        sync={"backend": "m:"},
    )
    with pytest.raises(ConfigError):
        await check_nodes(given, "cpu")
    (probe,) = probes
    assert (probe.grader and probe.grader.name, sorted(probe.code)) == (
        "m:grade",
        ["loss.function", "sync.backend"],
    )
    compared = ComparedNodes(given, "cpu", NodeReport("the driver"), load=False)
    await compared.reports(ray.nodes()[:1])
    assert (probes[1].grader, probes[1].code) == (None, {})


async def test_settings_of_nccl_in_the_config_are_the_drivers_too(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, alive: Callable[[int], None]
) -> None:
    alive(0)
    given = run_config(
        run_dir=str(tmp_path), cluster={"address": "auto", "env": {"NCCL_ALGO": "Ring"}}
    )
    compared = await check_nodes(given, "cpu")
    assert compared is not None
    assert compared.driver.settings["NCCL_ALGO"] == "Ring"
