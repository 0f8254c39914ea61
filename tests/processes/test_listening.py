"""Sockets of the run's own servers."""

from __future__ import annotations

import socket
from collections import namedtuple
from typing import Any

import psutil
import pytest

from async_opd.core.errors import StageError
from async_opd.processes.listening import interface_address, interface_of, listening_socket

HERE = "127.0.0.1"
Address = namedtuple("Address", "family address")


def port(listener: socket.socket) -> int:
    return int(listener.getsockname()[1])


def test_the_first_free_port_of_the_range_is_taken() -> None:
    with listening_socket(HERE) as taken:
        ports = range(port(taken), min(port(taken) + 50, 65536))
        with listening_socket(HERE, ports) as listener:
            assert port(listener) in ports[1:]
            socket.create_connection((HERE, port(listener)), 5).close()


def test_a_range_without_a_free_port_is_named_with_its_key() -> None:
    with listening_socket(HERE) as taken:
        only = range(port(taken), port(taken) + 1)
        with pytest.raises(StageError, match=rf"all ports from {port(taken)} .*127.0.0.1") as error:
            listening_socket(HERE, only)
    assert "cluster.ports" in error.value.remedy


def test_an_address_of_another_machine_is_an_error_of_its_own() -> None:
    with pytest.raises(OSError, match="assign"):
        listening_socket("198.51.100.1", range(20000, 20010))


@pytest.fixture
def interfaces(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine with an IPv4 and an IPv6 network, the loopback, and one without addresses."""
    v4, v6, link = socket.AF_INET, socket.AF_INET6, psutil.AF_LINK
    found: dict[str, list[Any]] = {
        "eth0": [Address(link, "00:00"), Address(v6, "fe80::1%eth0"), Address(v4, "10.0.0.7")],
        "ib0": [Address(v6, "fd00::7")],
        "lo": [Address(v4, "127.0.0.1"), Address(v6, "::1")],
        "down": [Address(link, "00:01")],
    }
    monkeypatch.setattr(psutil, "net_if_addrs", lambda: found)


@pytest.mark.usefixtures("interfaces")
def test_an_interfaces_ipv4_address_comes_first_and_a_missing_one_is_named() -> None:
    assert [interface_address(name) for name in ("eth0", "ib0")] == ["10.0.0.7", "fd00::7"]
    for name in ("eth1", "down"):
        words = rf"no interface '{name}' .* it has down, eth0, ib0, lo"
        with pytest.raises(StageError, match=words):
            interface_address(name)


@pytest.mark.usefixtures("interfaces")
@pytest.mark.parametrize(
    ("address", "name"),
    [
        ("10.0.0.7", "eth0"),
        ("fe80::1", "eth0"),
        ("fd00::7", "ib0"),
        ("127.0.0.1", "lo"),
        ("127.0.1.1", "lo"),
        ("::1", "lo"),
    ],
)
def test_an_interface_is_found_by_any_of_its_addresses(address: str, name: str) -> None:
    assert interface_of(address) == name


@pytest.mark.usefixtures("interfaces")
def test_an_address_that_no_interface_has_is_named_beside_those_that_there_are() -> None:
    """As of a machine behind a translation of addresses."""
    words = r"has 203.0.113.9, its node's address in Ray; it has eth0 \(fe80::1%eth0\), eth0 \(10.0"
    with pytest.raises(StageError, match=words) as error:
        interface_of("203.0.113.9")
    assert "cluster.interface" in error.value.remedy
