"""A weight sync from a trainer's rank to another process on this machine, without engines.

    FullWeights ──Publisher──► pinned snapshot ──transport──► chunks ──copied──► tensors on the GPU

The receiver copies each tensor to another on the device, where an engine would load it, and sends
back digests of these. Each way syncs ``SYNCS`` times, with a step between; the figures are the last
one's, but for ``first_ms``.

    backend       ``gloo`` over loopback or ``shared_memory``, to the same GPU; ``nccl``, to another
    ends_s        seconds until a send ends whose receiver was killed before; ``error``: its error
    snapshot_ms   until the copies are queued and their digests are there
    sync_ms       from the call of ``send`` until the receiver has all on its device
    gb_per_s      bytes over ``sync_ms``
    wrong         tensors whose digests at the receiver are not the trainer's, over all syncs
"""

from __future__ import annotations

import importlib
import multiprocessing
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import torch

from async_opd.tools.qualify.measurements.measuring import Figures, Report, finish
from async_opd.tools.qualify.measurements.students import micro_batch, rank_of, student
from async_opd.weight_sync.digests import Digests
from async_opd.weight_sync.layout import Rendezvous, WeightMeta, chunk_plan
from trainer.publisher import Publisher
from trainer.rank import Rank

BACKENDS = ("gloo", "shared_memory")
SIZES = {"cuda": ("qwen3-0.6b", 512, 256 << 20), "cpu": ("tiny", 64, 1 << 14)}
"""Shape, tokens of a step's row, and bytes of a chunk."""
SYNCS = 3
HOST, TIMEOUT_S, DEATH_S = "127.0.0.1", 60.0, 15.0


def receive(backend: str, at: Rendezvous, kind: str, orders: Any) -> None:
    """The receiver's process: joins, then receives once for each snapshot's metadata."""
    module = importlib.import_module(f"rollouter.transports.{backend}")
    device = torch.device(kind)
    if backend == "nccl":  # two members of a group of NCCL are never on the same GPU
        torch.cuda.set_device(1)
        device = torch.device(kind, 1)
    receiver = module.receiver(at, 1)
    loaded: dict[str, torch.Tensor] = {}
    while (meta := orders.recv()) is not None:
        for chunk in chunk_plan(meta.sizes, at.chunk_bytes):
            data = receiver.receive(sum(meta.sizes[index] for index in chunk), TIMEOUT_S)
            parts = data.split([meta.sizes[index] for index in chunk])
            for index, part in zip(chunk, parts, strict=True):
                dtype, shape = getattr(torch, meta.dtype_names[index]), meta.shapes[index]
                name, given = meta.names[index], part.view(dtype).view(shape)
                room = loaded.setdefault(name, torch.empty(shape, dtype=dtype, device=device))
                room.copy_(given)
        finish(device)
        orders.send("loaded")
        found = Digests(torch)
        for name, tensor in loaded.items():
            found.add(name, tensor)
        orders.send(found.values())
    receiver.close()


class Engine:
    """The receiver's process, as the trainer has it."""

    def __init__(self, backend: str, at: Rendezvous, device: torch.device) -> None:
        context = multiprocessing.get_context("spawn")
        self._orders, theirs = context.Pipe()
        given = (backend, at, device.type, theirs)
        self._process = context.Process(target=receive, args=given, daemon=True)
        self._process.start()

    def begin(self, meta: WeightMeta | None) -> None:
        """Receives what comes next; ends for None."""
        self._orders.send(meta)

    def answer(self) -> Any:
        """The next message of the receiver. TimeoutError without one."""
        if not self._orders.poll(TIMEOUT_S):
            raise TimeoutError(f"the receiver sent nothing for {TIMEOUT_S:g} s")
        return self._orders.recv()

    def kill(self) -> None:
        """Kills the process, which has joined and waits for an order."""
        self._process.kill()
        self._process.join(TIMEOUT_S)

    def end(self) -> None:
        """Ends the process."""
        self._process.join(TIMEOUT_S)
        self._process.kill()


def step(rank: Rank, tokens: int) -> None:
    """Changes the weights."""
    rank.backward([micro_batch(rank, [tokens])])
    rank.apply(1e-4)


def connected(
    backend: str, device: torch.device, timeout_s: float = TIMEOUT_S
) -> tuple[Rank, Publisher, Engine]:
    """A new rank, its publisher and the receiver of its weights."""
    shape, _, chunk_bytes = SIZES[device.type]
    rank = rank_of(student(shape, device), device)
    module = importlib.import_module(f"rollouter.transports.{backend}")
    sender = partial(module.sender, HOST, timeout_s, chunk_bytes)
    publisher = Publisher(rank.weights.sent, sender, digests=True, chunk_bytes=chunk_bytes)
    engine = Engine(backend, publisher.open(0, 2), device)
    publisher.connect(0)
    return rank, publisher, engine


def synced(backend: str, device: torch.device) -> Figures:
    """All syncs over one transport."""
    rank, publisher, engine = connected(backend, device)
    wrong, times = 0, []
    with ThreadPoolExecutor(1) as pool:
        for _ in range(SYNCS):
            step(rank, SIZES[device.type][1])
            finish(device)
            started = time.perf_counter()
            meta = publisher.snapshot()
            taken = time.perf_counter() - started
            engine.begin(meta)
            started = time.perf_counter()
            sending = pool.submit(publisher.send, 0)
            engine.answer()
            times.append((taken, time.perf_counter() - started))
            sending.result(TIMEOUT_S)
            found = engine.answer()
            sent = zip(meta.names, meta.digests, strict=True)
            wrong += sum(found[name] != digest for name, digest in sent)
        engine.begin(None)
    engine.end()
    (_, first), *_, (taken, last) = times
    return {
        "tensors": len(meta.names),
        "gib": meta.nbytes / (1 << 30),
        "snapshot_ms": 1e3 * taken,
        "first_ms": 1e3 * first,
        "sync_ms": 1e3 * last,
        "gb_per_s": meta.nbytes / last / 1e9,
        "wrong": wrong,
    }


def receiver_dies(backend: str, device: torch.device) -> Figures:
    """Seconds until the sender's error. RuntimeError if it has none without its receiver."""
    _, publisher, engine = connected(backend, device, DEATH_S)
    publisher.snapshot()
    engine.kill()
    started = time.perf_counter()
    try:
        publisher.send(0)
    except Exception as error:  # libraries raise different ones
        return {"error": type(error).__name__, "ends_s": time.perf_counter() - started}
    raise RuntimeError("the send has succeeded without its receiver")


def main(report: Report, *backends: str) -> None:
    """Over these transports, by default BACKENDS."""
    device = report.device
    for backend in backends or BACKENDS:
        work = partial(synced, backend, device)
        report.cell(work, what="sync", backend=backend, shape=SIZES[device.type][0])
    for backend in backends or BACKENDS:
        report.cell(partial(receiver_dies, backend, device), what="dies", backend=backend)
