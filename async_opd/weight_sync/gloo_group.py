"""A gloo group whose members have all authenticated themselves with its secret.

    rendezvous ──addresses──► gloo connects all to all ──► all exchange HMAC tags ──► group

gloo accepts every connection that names the right number, which can be guessed. So after the group
is made, every pair of members exchanges tags that only a holder of the secret can compute, over the
very connections that weights will take. This package imports no torch: callers pass it.
"""

from __future__ import annotations

import hmac
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

from async_opd.core.errors import WeightSyncError
from async_opd.weight_sync.layout import Rendezvous
from async_opd.weight_sync.rendezvous import (
    RendezvousClient,
    RendezvousServer,
    tags_expected,
    tags_sent,
)

Addresses = RendezvousServer | RendezvousClient


@dataclass(frozen=True)
class GlooGroup:
    """``group`` is torch's; it may still use the store as long as it lives."""

    group: Any
    store: Any


def gloo_group(
    torch: Any, at: Rendezvous, rank: int, address: str, addresses: Addresses
) -> GlooGroup:
    """Connects all members. WeightSyncError or RuntimeError if one is absent or has another secret.

    This one is ``rank``; its gloo listens on its own ``address`` only.
    """
    dist = torch.distributed
    store = _store(dist, addresses, at.timeout_s)
    options = dist.ProcessGroupGloo._Options()
    options._timeout = timedelta(seconds=at.timeout_s)
    options._devices = [dist.ProcessGroupGloo.create_device(hostname=address)]
    made = GlooGroup(dist.ProcessGroupGloo(store, rank, at.world_size, options), store)
    if not all_know_secret(torch, made.group, rank, at.world_size, at.secret):
        raise WeightSyncError(
            "weight sync",
            f"a rank of the group of {at.world_size} does not know its secret",
            "another process on this network or machine connected in a member's place",
        )
    return made


def all_know_secret(
    torch: Any, group: Any, rank: int, size: int, secret: bytes, device: str = "cpu"
) -> bool:
    """Whether every other rank sent the tag of a member. A collective."""
    ranks = range(size)
    data = bytearray(tags_sent(secret, rank, ranks))
    sent_tags = torch.frombuffer(data, dtype=torch.uint8).to(device)
    received_tags = torch.empty_like(sent_tags)
    group.alltoall_base(received_tags, sent_tags, [], []).wait()
    received = received_tags.cpu().numpy().tobytes()
    return hmac.compare_digest(received, tags_expected(secret, rank, ranks))


def _store(dist: Any, addresses: Addresses, timeout_s: float) -> Any:
    """The store through which torch reads and writes addresses."""

    class Store(dist.Store):  # type: ignore[misc]
        def set(self, key: str, value: bytes) -> None:
            addresses.set(key, bytes(value))

        def get(self, key: str) -> bytes:
            return addresses.get(key, timeout_s)

        def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
            for key in keys:
                addresses.get(key, timeout.total_seconds() if timeout else timeout_s)

    return Store()
