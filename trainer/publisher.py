"""The trainer's end of the weight sync: copies weights out, broadcasts them in packed chunks.

    each layer ──► host memory, wire dtype ── an event ──► send waits ──► chunk · chunk ──► engines

The copy of a layer is in host memory (``HostBuffers``) before the next one is gathered: beside
the student a GPU holds one whole layer at most. A GPU's copies may still be queued when
``snapshot`` returns (without digests, which wait for them), and ``send`` runs on another thread and
other streams: without the event it would read memory that does not hold the new weights yet.
The transport is passed in (``rollouter.transports``), so that this package needs no vllm.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Iterable, Iterator
from functools import partial
from typing import TYPE_CHECKING, Protocol

import torch

from async_opd.config.precision import SCHEMES
from async_opd.weight_sync.digests import Digests
from async_opd.weight_sync.layout import Rendezvous, WeightMeta
from async_opd.weight_sync.parameters import QUANTIZED
from trainer.offload import HostBuffers
from trainer.student.named_weights import frozen_names
from trainer.student.quantization import fake_quantized, parts_of

if TYPE_CHECKING:
    from async_opd.config.run_config import RunConfig
    from trainer.learner import Learner

Parts = Callable[[str, torch.Tensor], Iterable[tuple[str, torch.Tensor]]]
CHUNK_BYTES = 256 << 20
"""Of a snapshot's buffers, if the transport's are not given."""


class Transport(Protocol):
    """A group in which this process is rank 0 and the engines' workers are the others."""

    def open(self, world_size: int) -> Rendezvous:
        """Opens the rendezvous."""
        ...

    def connect(self) -> None:
        """Waits for the members; raises if one does not authenticate in time."""

    def close(self) -> None:
        """Leaves the group and closes its rendezvous."""

    def broadcast(self, weights: list[tuple[str, torch.Tensor]], meta: WeightMeta) -> float:
        """Sends all tensors, in order; returns the seconds in the collective library."""
        ...


class Publisher:
    """Owns the snapshot, and one transfer group per sync group of replicas.

    ``source`` yields the current weights under their checkpoint names, each valid until the next;
    ``transport`` makes a group.
    """

    def __init__(
        self,
        source: Callable[[], Iterator[tuple[str, torch.Tensor]]],
        transport: Callable[[], Transport],
        digests: bool = False,
        chunk_bytes: int = CHUNK_BYTES,
        frozen: tuple[str, ...] = (),
        quantize: Parts | None = None,
    ) -> None:
        """With ``digests`` the metadata of a snapshot holds those of its tensors.

        ``chunk_bytes`` are the transport's: chunks of that size are sent without another copy.
        ``frozen``: see ``WeightMeta``. ``quantize``: what engines make of a tensor that they
        quantize, of which the metadata then holds digests, too.
        """
        self._source = source
        self._new_transport = transport
        self._transports: dict[int, Transport] = {}
        self._buffers = HostBuffers(chunk_bytes)
        self._in_use = threading.Lock()  # while the buffers are written, or sent
        self._snapshot: list[tuple[str, torch.Tensor]] = []
        self._meta = WeightMeta((), (), (), ())
        self._copied: torch.cuda.Event | None = None
        self._with_digests = digests
        self._frozen = frozen
        self._quantize = quantize

    def open(self, group: int, world_size: int, connected: Collection[int] = ()) -> Rendezvous:
        """A new group for a sync group; see Transport.open. Closes all but the ``connected``."""
        for number in self._transports.keys() - set(connected):
            self._transports.pop(number).close()
        self._transports[group] = self._new_transport()
        return self._transports[group].open(world_size)

    def connect(self, group: int) -> None:
        """See Transport.connect."""
        self._transports[group].connect()

    def snapshot(self) -> WeightMeta:
        """Copies the weights; the learner may go on changing its own afterwards.

        Waits for a broadcast of the snapshot before.
        """
        with self._in_use:
            self._snapshot, self._meta = [], WeightMeta((), (), (), ())
            self._buffers.clear()
            digests, quantized = Digests(torch), Digests(torch)
            kinds = []
            quantize = self._quantize if self._with_digests else None
            source = self._source()
            for name, tensor in digests.add_all(source) if self._with_digests else source:
                kinds.append((str(tensor.dtype).split(".")[-1], tuple(tensor.shape), tensor.dtype))
                self._snapshot.append((name, self._buffers.copy(tensor)))
                for part, made in quantize(name, tensor) if quantize else ():
                    quantized.add(QUANTIZED + part, made)
            self._meta = WeightMeta(
                names=tuple(name for name, _ in self._snapshot),
                dtype_names=tuple(dtype for dtype, _, _ in kinds),
                shapes=tuple(shape for _, shape, _ in kinds),
                itemsizes=tuple(dtype.itemsize for _, _, dtype in kinds),
                digests=tuple(digests.values().values()),
                frozen=self._frozen,
                quantized=quantized.values(),
            )
            self._copied = _event_behind_all_work()
        return self._meta

    @property
    def meta(self) -> WeightMeta:
        """The content of the snapshot."""
        return self._meta

    def send(self, group: int) -> float:
        """Broadcasts the snapshot to a sync group, once all its copies are made.

        Returns the seconds in the collective library.
        """
        with self._in_use:
            if self._copied is not None:
                self._copied.synchronize()
            try:
                return self._transports[group].broadcast(self._snapshot, self._meta)
            except BaseException:
                # A collective that timed out ends for its caller only: its threads may go on, and
                # a member that is late would take a mixture of two snapshots for this one.
                self._buffers.give_up()
                raise


def _event_behind_all_work() -> torch.cuda.Event | None:
    """An event behind all that this thread has queued on its stream; None without a GPU."""
    if not torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        return None
    event = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
    event.record()
    return event


def publisher_of(
    config: RunConfig, learner: Learner, transport: Callable[[], Transport]
) -> Publisher:
    """Publishes the learner's weights, rounded where the config says so."""
    scheme, named = config.sync.fake_quantization, config.rollout.engine.quantization
    known = named is not None and SCHEMES[named].known
    source = partial(learner.named_weights, copied=False)
    return Publisher(
        source if scheme is None else lambda: fake_quantized(source(), scheme),
        transport,
        digests=config.sync.verify_every > 0,
        chunk_bytes=config.sync.chunk_mib << 20,
        frozen=frozen_names(learner.model),
        quantize=parts_of if known and config.rollout.tensor_parallel == 1 else None,
    )
