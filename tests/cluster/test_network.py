"""Where processes listen, and what all of them have in their environment."""

from __future__ import annotations

import os
import socket
from typing import Any, cast

import pytest
import ray

from async_opd.cluster import network
from async_opd.cluster.actor_shell import ActorShell
from async_opd.cluster.network import name_interface, own_address, shared_environment
from async_opd.config.sections.cluster import ClusterConfig
from async_opd.core.errors import StageError
from async_opd.models.engine_args import LOOPBACK

JOINED = ClusterConfig(address="auto")


@pytest.fixture(autouse=True)
def debian(monkeypatch: pytest.MonkeyPatch) -> None:
    """The host's name resolves to 127.0.1.1; Ray knows the node's address."""

    def resolved(*args: Any) -> str:
        return "127.0.1.1"

    monkeypatch.setattr(socket, "gethostbyname", resolved)
    monkeypatch.setattr(ray.util, "get_node_ip_address", lambda: "10.0.0.7")


@pytest.mark.parametrize(
    ("cluster", "address"),
    [
        (JOINED, "10.0.0.7"),
        (ClusterConfig(), "127.0.0.1"),
        (ClusterConfig(address="auto", interface="ib0"), "10.1.0.7"),
    ],
    ids=["Ray's address of the node", "the loopback of a local run", "the config's interface"],
)
def test_a_process_is_reached_at_the_address_of_its_cluster(
    monkeypatch: pytest.MonkeyPatch, cluster: ClusterConfig, address: str
) -> None:
    monkeypatch.setattr(network, "interface_address", {"ib0": "10.1.0.7"}.__getitem__)
    assert own_address(cluster) == address


def test_collectives_use_exactly_the_interface_of_the_config() -> None:
    cluster = ClusterConfig(address="auto", interface="ib0")
    given = {"NCCL_SOCKET_IFNAME": "eth", "NCCL_CUMEM_ENABLE": "0"}
    assert shared_environment(cluster, given) == {
        "GLOO_SOCKET_IFNAME": "ib0",
        "NCCL_SOCKET_IFNAME": "=ib0",
        "NCCL_CUMEM_ENABLE": "0",
    }


@pytest.mark.parametrize("address", ["auto", None])
def test_variables_of_the_config_come_in_place_of_the_drivers_but_not_of_the_loopback(
    address: str | None,
) -> None:
    env = {"NCCL_ALGO": "Ring", "MY_DATA": 2, "NCCL_IB_HCA": "mlx5"}
    cluster = ClusterConfig(address=address, env=cast(Any, env))
    found = shared_environment(cluster, {"NCCL_ALGO": "Tree", "HF_HOME": "/hf"})
    joined = {"HF_HOME": "/hf"} if address else LOOPBACK
    assert found == {"NCCL_ALGO": "Ring", "MY_DATA": "2", "NCCL_IB_HCA": "mlx5", **joined}


@pytest.fixture
def eth0(monkeypatch: pytest.MonkeyPatch) -> None:
    """The interface that has the node's address."""
    monkeypatch.setattr(network, "interface_of", {"10.0.0.7": "eth0"}.__getitem__)


@pytest.mark.usefixtures("eth0")
@pytest.mark.parametrize(
    ("given", "nccl"),
    [({}, "=eth0"), ({"GLOO_SOCKET_IFNAME": ""}, "=eth0"), ({"NCCL_SOCKET_IFNAME": "ib"}, "ib")],
)
def test_collectives_use_the_interface_of_the_nodes_address_unless_the_user_names_one(
    given: dict[str, str], nccl: str
) -> None:
    name_interface(given)
    assert given == {"GLOO_SOCKET_IFNAME": "eth0", "NCCL_SOCKET_IFNAME": nccl}


@pytest.mark.parametrize("cluster", [ClusterConfig(), ClusterConfig(address="a", interface="ib0")])
def test_no_interface_is_looked_for_where_one_is_named(
    monkeypatch: pytest.MonkeyPatch, cluster: ClusterConfig
) -> None:
    monkeypatch.setattr(network, "interface_of", pytest.fail)
    given = shared_environment(cluster, {})
    named = dict(given)
    name_interface(given)
    assert given == named


def test_a_node_without_an_interface_of_its_address_can_run_what_names_both() -> None:
    with pytest.raises(StageError, match="no interface"):
        name_interface({"GLOO_SOCKET_IFNAME": "eth0"})
    name_interface({"GLOO_SOCKET_IFNAME": "eth0", "NCCL_SOCKET_IFNAME": "eth0"})


@pytest.mark.usefixtures("eth0")
async def test_an_actors_process_names_its_interface_before_it_imports_anything(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name in LOOPBACK:
        monkeypatch.setenv(name, "")
    with pytest.raises(ModuleNotFoundError):
        await ActorShell.build(cast(Any, None), "no_such_module:made", ())
    assert os.environ["GLOO_SOCKET_IFNAME"] == "eth0"


def test_processes_of_a_joined_cluster_get_settings_of_networks_and_models_and_no_secret() -> None:
    shared = {
        "NCCL_CUMEM_ENABLE": "0",
        "NCCL_IB_HCA": "mlx5_0",
        "TORCH_NCCL_TRACE_BUFFER_SIZE": "0",
        "VLLM_NCCL_SO_PATH": "/opt/libnccl.so.2",
        "GLOO_SOCKET_IFNAME": "eth0",
        "HF_HOME": "/shared/hf",
        "HF_HUB_OFFLINE": "1",
        "https_proxy": "http://proxy:3128",
        "NO_PROXY": "10.0.0.0/8",
    }
    others = {"PATH": "/bin", "HOME": "/root", "CUDA_VISIBLE_DEVICES": "0", "NCCLX": "1"}
    secret = {"HF_TOKEN": "hf_short", "http_proxy": "http://user:password@proxy:3128"}
    assert shared_environment(JOINED, shared | others | secret) == shared
