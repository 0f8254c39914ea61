"""The TCP transport without room for all chunks: each is loaded when it comes, as on a GPU."""

from __future__ import annotations

from functools import partial

from rollouter.transports import chunks
from tests.rollouter import tcp_transport

BACKEND, DEVICES, sender = tcp_transport.BACKEND, tcp_transport.DEVICES, tcp_transport.sender


class UnstagedReceiver(tcp_transport.TcpReceiver):
    """See the module."""

    staged = False


receiver = UnstagedReceiver
engine_info = partial(chunks.chunk_info, __name__)
