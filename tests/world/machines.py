"""Machines on this one: a network, a mount and a host-name namespace each, joined by a switch.

    machine-a ══╗
    machine-b ══╬══ a bridge in a separate namespace
    machine-c ══╝

Each has its own address, host name, ``/etc/hosts``, ``/tmp/ray`` and ``/dev/shm``. All that runs in
one can be ended, and its cable cut. Needs root and the commands in ``NEEDED``.
"""

from __future__ import annotations

import json
import os
import secrets
import shutil
import signal
import subprocess
import sys
import time
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Self

import pytest

ROOT = Path(__file__).parents[2]
NEEDED = ("ip", "unshare", "nsenter", "mount")
NETWORK = "10.231.79"
PORT = 6379
STARTS = 5
END_S = 60
SHM = "512m"
SETUP = """
hostname machine-{name}
mkdir -p /tmp/ray
mount --bind {folder}/ray /tmp/ray
mount -t tmpfs -o size={shm} shm /dev/shm
mount --bind {folder}/hosts /etc/hosts
mount --bind /dev/null /etc/resolv.conf
echo ready
exec sleep infinity
"""


def ip(*words: str) -> None:
    """Calls ``ip``."""
    subprocess.run(["ip", *words], check=True, capture_output=True)


@dataclass(frozen=True)
class Machine:
    """One of them; its files are in ``folder``."""

    name: str
    address: str
    network: str
    switch: str
    cable: str
    folder: Path
    holder: subprocess.Popen[str]
    environment: tuple[str, ...]

    @property
    def inside(self) -> tuple[str, ...]:
        """What comes before a command that is to run there."""
        enter = ("nsenter", "-t", str(self.holder.pid), "--mount", "--uts", "--net", "--")
        return (*enter, "env", *self.environment)

    def power_off(self) -> None:
        """Ends all of its processes at once, but for the one that holds it."""
        self._end({self.holder.pid})

    def remove(self) -> None:
        """Ends all of its processes, and gives its network back."""
        self._end(set())
        self.holder.wait()
        with suppress(subprocess.CalledProcessError):
            ip("netns", "del", self.network)

    def cut(self) -> None:
        """Unplugs its cable."""
        ip("-n", self.switch, "link", "set", self.cable, "down")

    def heal(self) -> None:
        """Plugs its cable in again."""
        ip("-n", self.switch, "link", "set", self.cable, "up")

    def start_ray(self, head: Machine | None = None, has: str = "ray") -> str:
        """Starts Ray, as the head or as a node of its cluster; the head's address.

        ``has`` is a custom resource of the machine.

        Again where a raylet was too slow for its agent.
        """
        address = f"{(head or self).address}:{PORT}"
        role: tuple[str, ...] = ("--address", address)
        if head is None:
            role = ("--head", "--port", str(PORT), "--include-dashboard", "false")
        sizes = ("--num-cpus", "2", "--object-store-memory", str(100 << 20))
        program = str(Path(sys.executable).with_name("ray"))
        own = ("--resources", json.dumps({has: 1}))
        ray = (program, "start", *role, *sizes, *own, "--disable-usage-stats")
        for _ in range(STARTS):
            command = (*self.inside, *ray, "--node-ip-address", self.address)
            started = subprocess.run(command, capture_output=True, text=True, cwd=self.folder)
            if not started.returncode:
                return address
            self.power_off()
        raise AssertionError(started.stdout + started.stderr)

    def _end(self, but: set[int]) -> None:
        """Until none is left: one that is ended may just have started another."""
        deadline = time.monotonic() + END_S
        while pids := self._pids() - but:
            assert time.monotonic() < deadline, pids
            for pid in pids:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)

    def _pids(self) -> set[int]:
        found = subprocess.run(["ip", "netns", "pids", self.network], capture_output=True)
        return {int(pid) for pid in found.stdout.split()}


@dataclass
class Machines:
    """The machines of a test; at the end of the block all that they run ends."""

    folder: Path

    def __post_init__(self) -> None:
        """Skips the test where there cannot be any."""
        if os.geteuid() or not all(map(shutil.which, NEEDED)):
            pytest.skip(f"needs root and {', '.join(NEEDED)}: it makes network namespaces")
        self._prefix = f"opd{os.getpid()}"
        self._switch, self._numbers, self._stack = f"{self._prefix}-switch", count(1), ExitStack()
        self._secret = secrets.token_hex(32)

    def __enter__(self) -> Self:
        """Makes the switch."""
        made = subprocess.run(["ip", "netns", "add", self._switch], capture_output=True, text=True)
        if made.returncode:
            pytest.skip(f"network namespaces are not permitted here: {made.stderr}")
        self._stack.callback(ip, "netns", "del", self._switch)
        ip("-n", self._switch, "link", "add", "switch", "type", "bridge")
        ip("-n", self._switch, "link", "set", "switch", "up")
        return self

    def __exit__(self, *error: object) -> None:
        """Removes all."""
        self._stack.close()

    def add(self, name: str, hosts: str = "127.0.0.1 localhost\n") -> Machine:
        """One more, with these lines of names."""
        folder, network = self.folder / name, f"{self._prefix}-{name}"
        (folder / "ray").mkdir(parents=True)
        (folder / "hosts").write_text(hosts)
        number = next(self._numbers)
        cable, address = f"cable{number}", f"{NETWORK}.{number}"
        ip("netns", "add", network)
        setup = SETUP.format(name=name, folder=folder, shm=SHM)
        hold = ("unshare", "--mount", "--uts", "bash", "-ec", setup)
        holder = subprocess.Popen(
            ["ip", "netns", "exec", network, *hold], stdout=subprocess.PIPE, text=True
        )
        environment = {
            "RAY_AUTH_MODE": "token",
            "RAY_AUTH_TOKEN": self._secret,
            "RAY_worker_niceness": "0",
            "OMP_NUM_THREADS": "1",
            "PYTHONPATH": str(ROOT),
        }
        pairs = tuple(f"{key}={value}" for key, value in environment.items())
        switch = self._switch
        made = Machine(name, address, network, switch, cable, folder, holder, pairs)
        self._stack.callback(made.remove)
        assert holder.stdout is not None
        assert holder.stdout.readline() == "ready\n"
        ip("-n", switch, "link", "add", cable, "type", "veth", "peer", "eth0", "netns", network)
        ip("-n", switch, "link", "set", cable, "master", "switch", "up")
        ip("-n", network, "link", "set", "lo", "up")
        ip("-n", network, "addr", "add", f"{address}/24", "dev", "eth0")
        ip("-n", network, "link", "set", "eth0", "up")
        return made
