"""Sockets that listen from the moment that their port is chosen.

A port that is picked, released and told to another process can be taken by a third one meanwhile:
the socket itself is handed over instead.
"""

from __future__ import annotations

import errno
import socket

from async_opd.core.errors import StageError


def listening_socket(host: str, ports: range | None = None) -> socket.socket:
    """A socket that listens on the address ``host``, on the first free one of ``ports``.

    Without ``ports`` the system chooses. StageError if all of them are taken, OSError if ``host``
    is no address of this machine.
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
