"""Faults between the trainer's weights and the engines': each is a context of one sync.

The trainer's are here, those of an engine's worker in ``benchmarks.faulty_worker``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any
from unittest import mock

import torch

from async_opd.config.precision import SCHEMES
from async_opd.core.errors import WeightSyncError, WrongWeights
from benchmarks.faulty_worker import QUANTIZED
from benchmarks.freshness_world import STEP, World


def dropped(weights: list[tuple[str, Any]]) -> list[tuple[str, Any]]:
    """One matrix is not sent."""
    return [one for one in weights if one[0] != "model.layers.1.mlp.down_proj.weight"]


def swapped(weights: list[tuple[str, Any]]) -> list[tuple[str, Any]]:
    """Two matrices are sent under each other's names."""
    other = {"model.layers.0.self_attn.q_proj.weight": "model.layers.1.self_attn.q_proj.weight"}
    other |= {theirs: ours for ours, theirs in other.items()}
    found = dict(weights)
    return [(name, found[other.get(name, name)]) for name, _ in weights]


def at_source(w: World, change: Callable[[list[tuple[str, Any]]], list[tuple[str, Any]]]) -> Any:
    """The trainer copies out other weights than it trains: digests are those of the copies."""
    source = w.publisher._source

    def faulty() -> Iterator[tuple[str, Any]]:
        return iter(change(list(source())))

    return mock.patch.object(w.publisher, "_source", faulty)


def old_snapshot(w: World) -> Any:
    """The sender sends the snapshot before."""
    # copies: the buffers are the next snapshot's, too
    before = [(name, tensor.clone()) for name, tensor in w.publisher._snapshot]
    send = w.publisher.send

    def faulty(group: int) -> float:
        with mock.patch.object(w.publisher, "_snapshot", before):
            return send(group)

    return mock.patch.object(w.publisher, "send", faulty)


def wrong_dtype() -> Any:
    """Bytes in another dtype: bfloat16 as float16; float32 loses its bits beyond bfloat16."""
    from rollouter.transports import chunks

    packed = chunks.packed

    def other(weight: Any) -> Any:
        if weight.dtype == torch.bfloat16:
            return weight.to(torch.float16).view(torch.bfloat16)
        return weight.to(torch.bfloat16).to(weight.dtype)

    def faulty(weights: list[tuple[str, Any]], chunk: range) -> Any:
        return packed([(name, other(weight)) for name, weight in weights], chunk)

    return mock.patch.object(chunks, "packed", faulty)


def without_digests() -> Any:
    """The replica does not look at what its engine was given."""
    from rollouter.replica import StudentReplica

    receive = StudentReplica.receive

    async def faulty(replica: Any, meta: Any) -> None:
        await receive(replica, replace(meta, digests=()))

    return mock.patch.object(StudentReplica, "receive", faulty)


FAULTS = (
    "dropped tensor",
    "two swapped",
    "one shard of two",
    "stale tied head",
    "old snapshot",
    "ignored update",
    "wrong dtype",
    "truncated chunk",
    "norm left out",
    "bias left out",
    "scaled matrix",
    "false version",
)
"""Of engines in any precision; those that are not the trainer's are the engine's
(``benchmarks.faulty_worker``)."""


def faults_of(kind: str) -> tuple[str, ...]:
    """The faults that engines of a dtype, or of a scheme of quantization, can have."""
    return FAULTS + tuple(QUANTIZED) if kind in SCHEMES else FAULTS


def of_the_trainer(w: World, name: str) -> AbstractContextManager[Any]:
    """The context of a fault outside of the engine; of another one it does nothing."""
    if name in ("dropped tensor", "two swapped"):
        return at_source(w, dropped if name == "dropped tensor" else swapped)
    if name == "old snapshot":
        return old_snapshot(w)
    if name == "wrong dtype":
        return wrong_dtype()
    return without_digests() if name == "false version" else nullcontext()


async def caught(w: World, name: str, step: float = STEP) -> str:
    """Injects a fault into one sync, of the last replica if it is an engine's.

    The sync moves each weight by ``step``. Returns the reason for which replicas were found wrong,
    or an empty text. They are rebuilt without the fault.
    """
    w.move(step)
    await w.replicas[-1]._rpc("begin_fault", name)
    refused = []
    try:
        with of_the_trainer(w, name):
            await w.push()
    except WeightSyncError as error:
        refused = [str(error)]
    wrong = sorted(str(one) for one in w.failures.values() if isinstance(one, WrongWeights))
    reasons = refused + wrong
    await w.replicas[-1]._rpc("end_fault")
    await w.mend()
    return reasons[0] if reasons else ""


async def shown(w: World) -> dict[str, str]:
    """The faults that are found, each with the reason."""
    found = {}
    for name in faults_of(w.kind):
        if reason := await caught(w, name):
            found[name] = reason
        print(f"  {name}: {reason.splitlines()[0] if reason else 'NOT FOUND'}", flush=True)
    return found
