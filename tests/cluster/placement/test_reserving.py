"""A cluster that is too small for a run is refused with a table of its nodes."""

from __future__ import annotations

import pytest
import ray

from async_opd.cluster.placement import nodes
from async_opd.cluster.placement.reserving import planned
from async_opd.core.errors import ConfigError
from tests.world.config import run_config


def test_the_table_of_a_cluster_without_gpus_has_its_nodes_and_names_the_cpu(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    node = {"NodeID": "a", "Alive": True, "NodeManagerHostname": "n", "Resources": {"CPU": 2.0}}
    monkeypatch.setattr(ray, "nodes", lambda: [node | {"NodeManagerAddress": "10.0.0.1"}])
    monkeypatch.setattr(ray._private.state, "available_resources_per_node", dict)
    monkeypatch.setattr(nodes, "draining_nodes", frozenset)
    with pytest.raises(ConfigError) as refused:
        planned(run_config(), "cuda", nodes.gpu_nodes())
    (problem,) = refused.value.problems
    assert problem.message.splitlines()[-1].split() == ["n", "(10.0.0.1)", "0", "0"]
    assert "cluster.device: cpu" in problem.remedy
