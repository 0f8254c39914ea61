"""Ranks and the weight sync of two machines connect, whatever the machines' names resolve to."""

from __future__ import annotations

import os
import re
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import psutil
import pytest

from tests.world.machines import NETWORK, Machines

MACHINES = {"b": f"{NETWORK}.1", "c": f"{NETWORK}.2"}
HOSTS = {
    "nothing": "127.0.0.1 localhost\n",
    "the loopback, as on Debian": "127.0.0.1 localhost\n127.0.1.1 machine-b machine-c\n",
    "their addresses": "".join(f"{at} machine-{name}\n" for name, at in MACHINES.items()),
}
PORT, BOUND_S = 23456, 60


def joins(rank: int, address: str) -> None:
    """Runs on a machine of that address in Ray: joins a mesh of two with each file of names."""
    import ray
    import torch

    from async_opd.cluster.network import name_interface, own_address
    from async_opd.config.sections.cluster import ClusterConfig
    from rollouter.transports.gloo import GlooReceiver, GlooSender
    from trainer.rank_group import RankSpec
    from trainer.student.sharding import join_mesh

    ray.util.get_node_ip_address = lambda: address
    name_interface(os.environ)
    for at, (names, lines) in enumerate(HOSTS.items()):
        Path("/etc/hosts").write_text(lines)
        host, port = MACHINES["b"], PORT + at
        listener = None if rank else socket.create_server((host, port)).detach()
        spec = RankSpec(rank, 2, host, port, BOUND_S, BOUND_S, b"secret", listener)
        mesh = join_mesh(spec, torch.device("cpu"))
        print(f"{mesh.size()} connected: {names}", flush=True)
        sender = GlooSender(own_address(ClusterConfig(address="auto")), BOUND_S, 16)
        shared = [None if rank else sender.open(2)]
        torch.distributed.broadcast_object_list(shared)
        if rank:
            weights = GlooReceiver(shared[0], rank).receive(4, BOUND_S)  # type: ignore[arg-type]
        else:
            weights = torch.arange(4, dtype=torch.uint8)
            sender.connect()
            sender.send(weights, BOUND_S)
        print(f"weights {weights.tolist()}: {names}", flush=True)
        print(f"listens on {listening()}: {names}", flush=True)
        torch.distributed.destroy_process_group()


@pytest.fixture(scope="module")
def said(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[str]]:
    """The words of both ranks, each on another machine."""
    with Machines(tmp_path_factory.mktemp("machines")) as machines, ExitStack() as stack:
        ranks = []
        for rank, name in enumerate(MACHINES):
            machine = machines.add(name)
            joined = f"from {__name__} import joins; joins({rank}, {machine.address!r})"
            limit = "timeout", "-s", "KILL", str(3 * BOUND_S)
            process = subprocess.Popen(
                [*limit, *machine.inside, sys.executable, "-c", joined],
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
            )
            ranks.append(stack.enter_context(process))
        yield [rank.communicate()[0] for rank in ranks]


def listening() -> list[str]:
    """The addresses that this process listens on."""
    connections = psutil.Process().net_connections("inet")
    return sorted({one.laddr.ip for one in connections if one.status == psutil.CONN_LISTEN})


@pytest.mark.slow
@pytest.mark.parametrize("names", HOSTS)
def test_ranks_of_two_machines_connect_where_names_resolve_to(said: list[str], names: str) -> None:
    for words in said:
        assert f"2 connected: {names}\n" in words, words


@pytest.mark.slow
@pytest.mark.parametrize("names", HOSTS)
def test_weights_reach_the_other_machine_where_names_resolve_to(
    said: list[str], names: str
) -> None:
    for words in said:
        assert f"weights [0, 1, 2, 3]: {names}\n" in words, words


@pytest.mark.slow
@pytest.mark.parametrize("names", HOSTS)
def test_no_process_listens_on_the_loopback_where_names_resolve_to(
    said: list[str], names: str
) -> None:
    for words in said:
        (line,) = re.findall(rf"listens on (.*): {names}\n", words)
        assert "127." not in line
        assert "10." in line
