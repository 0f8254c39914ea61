"""The TCP transport without room for all chunks: each is loaded when it comes, as on a GPU."""

from __future__ import annotations

from tests.rollouter import tcp_transport

DEVICES, sender = tcp_transport.DEVICES, tcp_transport.sender


class UnstagedReceiver(tcp_transport.TcpReceiver):
    """See the module."""

    staged = False


receiver = UnstagedReceiver
