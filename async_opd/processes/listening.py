"""Sockets that listen from the moment that their port is chosen.

A port that is picked, released and sent to another process can be taken by a third one meanwhile:
the socket itself is handed over instead.
"""

from __future__ import annotations

import errno
import socket

from async_opd.core.errors import StageError


def listening_socket(host: str, ports: range | None = None) -> socket.socket:
    """A socket that listens on the address ``host``, on the first free one of ``ports``.

    Without ``ports`` the system chooses. StageError if all of them are taken, OSError if ``host``
    is not an address of this machine.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    for port in (0,) if ports is None else ports:
        try:
            return socket.create_server((host, port), family=family)
        except OSError as error:
            if error.errno != errno.EADDRINUSE:
                raise
    assert ports is not None, "the system has a free port"
    cause = f"all ports from {ports.start} to {ports.stop - 1} of {host} are taken"
    raise StageError("network", cause, "widen cluster.ports")


def interface_address(name: str) -> str:
    """The first IPv4 address of a network interface of this machine, else its first IPv6 address.

    StageError if there is no such interface, or if it has no address.
    """
    import psutil  # the trainer's measurements on a GPU do without it

    interfaces = psutil.net_if_addrs()
    for family in (socket.AF_INET, socket.AF_INET6):
        for found in interfaces.get(name, ()):
            if found.family == family:
                return str(found.address)
    raise StageError(
        "network",
        f"{socket.gethostname()} has no interface {name!r} with an address; it has "
        + ", ".join(sorted(interfaces)),
        "set cluster.interface to a name that every node has, or leave it out",
    )


def interface_of(address: str) -> str:
    """The name of this machine's interface that has the address. StageError if none has.

    Every loopback address belongs to the loopback interface: 127.0.1.1, too.
    """
    import psutil

    interfaces = psutil.net_if_addrs()
    for name, found in sorted(interfaces.items()):
        if any(_is_same(one.address.partition("%")[0], address) for one in found):
            return str(name)
    has = [
        f"{name} ({one.address})"
        for name, found in sorted(interfaces.items())
        for one in found
        if one.family in (socket.AF_INET, socket.AF_INET6)
    ]
    raise StageError(
        "network",
        f"no interface of {socket.gethostname()} has {address}, its node's address in Ray; it has "
        + ", ".join(has),
        "start Ray there with --node-ip-address and one of them, or set cluster.interface",
    )


def _is_same(address: str, other: str) -> bool:
    return address == other or (_is_loopback(address) and _is_loopback(other))


def _is_loopback(address: str) -> bool:
    return address == "::1" or address.startswith("127.")
