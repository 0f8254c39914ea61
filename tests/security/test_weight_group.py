"""The weight sync's group: a process with its port and not its secret does not join."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from datetime import timedelta
from functools import partial
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import async_opd.weight_sync.rendezvous as rendezvous_module
from async_opd.cluster import actor_names
from async_opd.cluster.actor_factory import ActorFactory, Factories
from async_opd.cluster.remote import Remote
from async_opd.core.errors import StageError, WeightSyncError
from async_opd.models.engine_args import LOOPBACK
from async_opd.weight_sync.layout import Rendezvous, WeightMeta
from async_opd.weight_sync.rendezvous import (
    RendezvousClient,
    RendezvousServer,
    gloo_group,
    new_secret,
    tags_expected,
    tags_sent,
)
from benchmarks.local_ranks import in_processes
from rollouter.transports import nccl as nccl_transport
from rollouter.transports.chunks import chunk_info
from rollouter.transports.gloo import GlooReceiver, GlooSender
from rollouter.transports.nccl import NcclSender
from tests.world.config import run_config
from trainer.publisher import Publisher

HERE = "127.0.0.1"
BOUND_S = 20.0
NO_PROOF = b"y" * 32
WEIGHTS = [(name, torch.arange(4, dtype=torch.float32)) for name in ("a", "b")]

Together = Callable[..., list[Future[Any]]]


@pytest.fixture
def together() -> Iterator[Together]:
    """Runs functions side by side; returns when all have ended."""
    with ThreadPoolExecutor(8) as pool:

        def run(*works: Callable[[], Any]) -> list[Future[Any]]:
            futures = [pool.submit(work) for work in works]
            for future in futures:
                future.exception(BOUND_S)
            return futures

        yield run


@pytest.fixture
def transport() -> Iterator[GlooSender]:
    sender = GlooSender(HERE, BOUND_S, 16)
    yield sender
    sender.close()


def joins(at: Rendezvous, rank: int, secret: bytes | None = None) -> Any:
    """The part of an engine."""
    return GlooReceiver(replace(at, secret=secret or at.secret), rank)


def receives(receiver: GlooReceiver, *sizes: int) -> bytes:
    return b"".join(receiver.receive(nbytes, BOUND_S).numpy().tobytes() for nbytes in sizes)


def listening() -> set[str]:
    """The addresses that this process listens on."""
    connections = psutil.Process().net_connections()
    return {c.laddr.ip for c in connections if c.status == psutil.CONN_LISTEN}


def test_members_who_know_the_secret_make_a_group(
    transport: GlooSender, together: Together
) -> None:
    at = transport.open(3)
    _, *members = together(transport.connect, lambda: joins(at, 1), lambda: joins(at, 2))
    meta = Publisher(lambda: iter(WEIGHTS), lambda: transport)
    meta.snapshot()
    works = [partial(receives, member.result(), 16, 16) for member in members]
    _, *got = together(lambda: transport.broadcast(WEIGHTS, meta.meta), *works)
    assert [future.result() for future in got] == [WEIGHTS[0][1].numpy().tobytes() * 2] * 2


def test_a_local_run_is_reached_from_this_machine_only(
    transport: GlooSender, together: Together
) -> None:
    before = listening()
    at = transport.open(2)
    assert listening() - before <= {HERE}
    futures = together(transport.connect, lambda: joins(at, 1))
    assert [future.exception() for future in futures] == [None, None]
    assert listening() - before <= {HERE}


def test_when_the_group_is_made_nobody_can_come_any_more(
    transport: GlooSender, together: Together
) -> None:
    at = transport.open(2)
    together(transport.connect, lambda: joins(at, 1))
    with pytest.raises(OSError, match="refused"):
        socket.create_connection((HERE, at.port), BOUND_S)


def test_a_group_that_is_replaced_can_be_joined_by_nobody(together: Together) -> None:
    publisher = Publisher(lambda: iter(WEIGHTS), lambda: GlooSender(HERE, BOUND_S, 16))
    first = publisher.open(0, 2)
    publisher.open(0, 2)
    with pytest.raises(OSError, match="refused"):
        socket.create_connection((HERE, first.port), BOUND_S)


@pytest.mark.slow
def test_torchs_own_store_finds_no_store_at_the_port(
    transport: GlooSender, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The earlier fault of the weight sync: rank 1 by the port alone."""
    monkeypatch.setattr(rendezvous_module, "HANDSHAKE_S", 1.0)
    at = transport.open(2)
    with pytest.raises(torch.distributed.DistError):
        torch.distributed.TCPStore(
            HERE, at.port, is_master=False, timeout=timedelta(seconds=2)
        ).get("0/0")


def told(port: int, *said: bytes) -> bytes:
    """All bytes that the server answers to these: none if it closes the connection before."""
    heard = b""
    with socket.create_connection((HERE, port), BOUND_S) as connection, suppress(ConnectionError):
        for line in said:
            connection.sendall(line)
        while more := connection.recv(4096):
            heard += more
    return heard


@pytest.mark.parametrize(
    "said",
    [
        (b"",),
        (b"x" * 31,),
        (b"x" * 32, b"y" * 32),
        (b"x" * 32, b"y" * 32, b'{"key": "0/0"}\n'),
        (b'{"key": "0/0"}\n' * 10,),
    ],
)
@pytest.mark.slow
def test_a_process_without_the_secret_reads_no_address(
    said: tuple[bytes, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rendezvous_module, "HANDSHAKE_S", 1.0)
    server = RendezvousServer(HERE, new_secret(), 2, BOUND_S)
    server.set("0/0", b"an address")
    try:
        heard = told(server.port, *said)
    finally:
        server.close()
    assert len(heard) in (0, 64)  # a nonce, and the tag of the nonce that was sent
    assert b"an address".hex().encode() not in heard


def test_a_tag_that_was_received_authenticates_no_other_connection() -> None:
    secret = new_secret()
    server = RendezvousServer(HERE, secret, 2, BOUND_S)
    try:
        heard = told(server.port, b"x" * 32, NO_PROOF)
        replayed = told(server.port, b"x" * 32, heard[32:64], b'{"key": "k", "value": "00"}\n')
        assert len(replayed) in (0, 64)
        with pytest.raises(WeightSyncError, match="connections did not authenticate"):
            server.get("k", 0.1)
    finally:
        server.close()


def test_a_process_with_another_secret_does_not_keep_a_member_out(
    transport: GlooSender, together: Together
) -> None:
    at = transport.open(2)
    with pytest.raises(WeightSyncError, match="does not know the secret"):
        joins(at, 1, secret=new_secret())
    sender, member = together(transport.connect, lambda: joins(at, 1))
    assert (sender.exception(), member.exception()) == (None, None)


def test_a_sender_that_does_not_know_the_secret_is_not_joined() -> None:
    other = RendezvousServer(HERE, new_secret(), 2, BOUND_S)
    try:
        with pytest.raises(WeightSyncError, match="the server there does not know the secret"):
            RendezvousClient(HERE, other.port, new_secret(), BOUND_S)
    finally:
        other.close()


def test_a_member_with_another_secret_is_found_before_weights_are_sent(
    transport: GlooSender, together: Together
) -> None:
    """gloo itself believed it: it came before the member, to the right connection."""
    at = transport.open(3)
    book = RendezvousClient(at.host, at.port, at.secret, BOUND_S)
    other = replace(at, secret=new_secret(), timeout_s=BOUND_S)
    sender, _, honest = together(
        transport.connect,
        lambda: gloo_group(torch, other, 1, HERE, book),
        lambda: joins(at, 2),
    )
    book.close()
    for future in (sender, honest):
        with pytest.raises(WeightSyncError, match="a rank of the group of 3 does not know"):
            future.result()
    with pytest.raises(AssertionError, match="connected first"):
        transport.broadcast(WEIGHTS, WeightMeta(("a", "b"), ("float32",) * 2, ((4,),) * 2, (4, 4)))


def test_the_error_of_a_missing_member_counts_the_unauthenticated_connections() -> None:
    server = RendezvousServer(HERE, new_secret(), 2, BOUND_S)
    told(server.port, b"x" * 64)
    try:
        with pytest.raises(
            WeightSyncError, match=r"no '0/1'\), and 1 connections did not authenticate"
        ):
            server.get("0/1", 0.2)
    finally:
        server.close()


def test_the_repr_of_a_rendezvous_does_not_contain_the_secret(transport: GlooSender) -> None:
    at = transport.open(2)
    assert at.secret.hex() not in repr(at)
    assert repr(at.secret) not in repr(at)


def test_every_group_has_a_secret_of_its_own() -> None:
    made = [GlooSender(HERE, BOUND_S, 16) for _ in range(2)]
    secrets = {transport.open(2).secret for transport in made}
    for transport in made:
        transport.close()
    assert len(secrets) == 2
    assert {len(secret) for secret in secrets} == {32}


@given(st.integers(2, 9), st.data())
def test_another_rank_receives_what_one_rank_sends(size: int, data: Any) -> None:
    secret = new_secret()
    rank, other = data.draw(st.permutations(range(size)))[:2]
    said = tags_sent(secret, rank, range(size))[32 * other : 32 * (other + 1)]
    heard = tags_expected(secret, other, range(size))[32 * rank : 32 * (rank + 1)]
    assert said == heard
    assert said != tags_sent(secret, other, range(size))[32 * rank : 32 * (rank + 1)]


# ── NCCL ──────────────────────────────────────────────────────────────────────────────────────


@pytest.fixture
def nccl(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, ...]]:
    """vLLM's communicator without a GPU: remembers what it was made of."""
    import vllm.distributed.device_communicators.pynccl_wrapper as wrapper

    made: list[tuple[Any, ...]] = []

    class Library:
        def ncclGetUniqueId(self) -> Any:  # noqa: N802
            unique = wrapper.ncclUniqueId()
            unique.internal[:] = [byte - 256 if byte > 127 else byte for byte in os.urandom(128)]
            return unique

    monkeypatch.setattr(wrapper, "NCCLLibrary", Library)

    def communicator(*given: Any) -> Any:
        made.append(given)
        return SimpleNamespace(device=torch.device("cpu"))

    monkeypatch.setattr(nccl_transport, "_communicator", communicator)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    return made


def test_gpus_connect_by_an_id_that_comes_over_ray_and_by_no_store(nccl: list[Any]) -> None:
    transport = NcclSender(HERE, BOUND_S, 1 << 20)
    at = transport.open(3)
    transport.connect()
    assert nccl == [(at.secret, 0, 3, 0)]
    told = chunk_info("module", at)["at"]
    assert bytes.fromhex(told["secret"]) == at.secret
    assert (told["host"], told["port"]) == ("", 0)


def test_every_group_of_gpus_has_an_id_of_its_own(nccl: list[Any]) -> None:
    transports = [NcclSender(HERE, BOUND_S, 1 << 20) for _ in range(2)]
    assert len({transport.open(2).secret for transport in transports}) == 2


# ── the trainer's ranks, and the processes of a run ───────────────────────────────────────────


def joins_mesh(spec: Any, *rest: Any) -> str:
    from trainer.student.sharding import join_mesh

    try:
        join_mesh(spec, torch.device("cpu"))
    except StageError as error:
        return error.cause
    return "joined"


def other(spec: Any) -> Any:
    joins_mesh(replace(spec, secret=b"another"))
    return SimpleNamespace()


def test_a_rank_with_another_secret_is_found() -> None:
    found = in_processes(2, joins_mesh, other, 60.0)
    assert "one of its 2 ranks failed to prove that it knows the run's secret" in found


def test_ranks_that_know_their_secret_are_connected() -> None:
    def follows(spec: Any) -> Any:
        joins_mesh(spec)
        return SimpleNamespace()

    assert in_processes(2, joins_mesh, follows, 60.0) == "joined"


@pytest.mark.parametrize(("address", "expected"), [(None, LOOPBACK), ("auto", {"HF_HOME": "/h"})])
async def test_collectives_of_a_local_run_listen_on_the_loopback(
    monkeypatch: pytest.MonkeyPatch, address: str | None, expected: dict[str, str]
) -> None:
    seen: list[dict[str, str]] = []
    monkeypatch.setattr(os, "environ", {"HF_HOME": "/h", "HF_TOKEN": "hf_0", "HOME": "/"})

    def create(name: str, *, env: dict[str, str], **rest: Any) -> Any:
        seen.append(env)
        return SimpleNamespace()

    monkeypatch.setattr(Remote, "create", create)
    config = run_config(name="n", cluster={"address": address})
    actor_factory = ActorFactory(config, "cpu", (), Factories(), lambda text: None)
    await actor_factory.create(actor_names.trainer(0), env={"OMP_NUM_THREADS": "1"})
    assert seen == [{"OMP_NUM_THREADS": "1", **expected}]
