"""Where processes listen, and what all of them have in their environment."""

from __future__ import annotations

import socket
from typing import Any

import pytest
import ray

from async_opd.cluster import network
from async_opd.cluster.network import own_address, shared_environment
from async_opd.config.sections.cluster import ClusterConfig

JOINED = ClusterConfig(address="auto")


@pytest.fixture(autouse=True)
def debian(monkeypatch: pytest.MonkeyPatch) -> None:
    """The host's name resolves to 127.0.1.1; Ray knows the node's address."""

    def resolved(*args: Any) -> str:
        return "127.0.1.1"

    monkeypatch.setattr(socket, "gethostbyname", resolved)
    monkeypatch.setattr(ray.util, "get_node_ip_address", lambda: "10.0.0.7")


def test_a_process_of_a_joined_cluster_is_reached_at_rays_address_of_its_node() -> None:
    assert own_address(JOINED) == "10.0.0.7"


def test_a_local_run_is_on_the_loopback() -> None:
    assert own_address(ClusterConfig()) == "127.0.0.1"


def test_the_interface_of_the_config_comes_before_rays_address(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(network, "interface_address", {"ib0": "10.1.0.7"}.__getitem__)
    assert own_address(ClusterConfig(address="auto", interface="ib0")) == "10.1.0.7"


def test_collectives_use_exactly_the_interface_of_the_config() -> None:
    cluster = ClusterConfig(address="auto", interface="ib0")
    given = {"NCCL_SOCKET_IFNAME": "eth", "NCCL_CUMEM_ENABLE": "0"}
    assert shared_environment(cluster, given) == {
        "GLOO_SOCKET_IFNAME": "ib0",
        "NCCL_SOCKET_IFNAME": "=ib0",
        "NCCL_CUMEM_ENABLE": "0",
    }


def test_processes_of_a_joined_cluster_get_the_drivers_settings_of_networks_and_models() -> None:
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
    assert shared_environment(JOINED, shared | others) == shared


def test_secrets_stay_with_the_driver() -> None:
    secret = {"HF_TOKEN": "hf_short", "http_proxy": "http://user:password@proxy:3128"}
    assert shared_environment(JOINED, secret) == {}
