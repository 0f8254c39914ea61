"""Ranks on two machines connect, whatever the names of the machines resolve to.

    machine-b (10.231.78.1) ══ two network namespaces, a cable ══ machine-c (10.231.78.2)

Each also has its own host name and its own /etc/hosts.
"""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
MACHINES = {"b": "10.231.78.1", "c": "10.231.78.2"}
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

    from async_opd.cluster.network import name_interface
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
        torch.distributed.destroy_process_group()


@pytest.fixture(scope="module")
def networks() -> Iterator[dict[str, str]]:
    """The network namespace of each machine."""
    if os.geteuid() or not all(map(shutil.which, ("ip", "unshare", "mount"))):
        pytest.skip("needs root, ip, unshare and mount: it makes network namespaces")
    names = {machine: f"opd-{os.getpid()}-{machine}" for machine in MACHINES}
    with ExitStack() as stack:
        for name in names.values():
            made = subprocess.run(["ip", "netns", "add", name], capture_output=True, text=True)
            if made.returncode:
                pytest.skip(f"network namespaces are not permitted here: {made.stderr}")
            stack.callback(subprocess.run, ["ip", "netns", "del", name], check=True)
        b, c = names.values()
        cable = f"link add eth0 netns {b} type veth peer name eth0 netns {c}"
        subprocess.run(["ip", *cable.split()], check=True)
        for machine, name in names.items():
            for command in ("link set lo up", f"addr add {MACHINES[machine]}/24 dev eth0"):
                subprocess.run(["ip", "-n", name, *command.split()], check=True)
            subprocess.run(["ip", "-n", name, "link", "set", "eth0", "up"], check=True)
        yield names


@pytest.fixture(scope="module")
def said(networks: dict[str, str], tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """The words of both ranks, each on another machine."""
    folder, ranks = tmp_path_factory.mktemp("machines"), []
    with ExitStack() as stack:
        for rank, (machine, network) in enumerate(networks.items()):
            hosts = folder / machine
            hosts.touch()
            setup = (
                f"hostname machine-{machine}; mount --bind {hosts} /etc/hosts; "
                'mount --bind /dev/null /etc/resolv.conf; exec "$@"'
            )
            joined = f"from {__name__} import joins; joins({rank}, {MACHINES[machine]!r})"
            limit = "timeout", "-s", "KILL", str(2 * BOUND_S)
            inside = "ip", "netns", "exec", network, "unshare", "--mount", "--uts"
            command = "bash", "-ec", setup, "rank", sys.executable, "-c", joined
            process = subprocess.Popen(
                [*limit, *inside, *command],
                env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
            )
            ranks.append(stack.enter_context(process))
        return [rank.communicate()[0] for rank in ranks]


@pytest.mark.slow
@pytest.mark.parametrize("names", HOSTS)
def test_ranks_of_two_machines_connect_where_names_resolve_to(said: list[str], names: str) -> None:
    for words in said:
        assert f"2 connected: {names}\n" in words, words
