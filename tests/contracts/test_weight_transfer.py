"""Weights through vLLM's weight-transfer API and NCCL communicator, with NCCL itself replaced.

    Publisher ─ NcclSender ─ PyNcclCommunicator ─ fake NCCL ─ PyNcclCommunicator ─ NcclReceiver
                                                                                        │
    StudentReplica ─ AsyncLLM ─ Worker ─ ChunkEngine ─ vLLM's layer-wise reload ◄───────┘

Real are all of these but NCCL, CUDA's streams and the processes: a worker is a thread here.
"""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Iterator
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from async_opd.config.sections.reliability import SupervisionConfig
from async_opd.core.errors import ProcessDied, WeightSyncError
from async_opd.processes.members import MemberSet, Policy
from async_opd.weight_sync.coordinator import BroadcastSync
from async_opd.weight_sync.layout import Rendezvous, WeightMeta
from rollouter.transports import chunks, nccl
from tests.contracts import contract
from tests.contracts.fake_gpu import ABORT_S, Gpu, gpu  # noqa: F401 - a fixture
from tests.world.clock import settle
from tests.world.replica import replica_on
from trainer.publisher import Publisher
from trainer.stage import TrainerStage
from trainer.work_thread import WorkThread

pytestmark = pytest.mark.slow  # imports vllm

CHUNK = 64
SOON = 2.0
"""Seconds after which a group breaks off: what stands still is fake, so nothing is waited for."""
BOUND = 60.0


class Model(torch.nn.Module):
    """Tensors smaller and larger than a chunk, of two dtypes, at odd addresses when packed."""

    def __init__(self, value: float) -> None:
        super().__init__()
        self.small = torch.nn.Linear(3, 1, bias=False, dtype=torch.bfloat16)
        self.large = torch.nn.Linear(30, 11, bias=False)
        self.last = torch.nn.Linear(5, 1, bias=False)
        for index, parameter in enumerate(self.parameters()):
            parameter.data = torch.arange(parameter.numel()).view(parameter.shape).to(
                parameter.dtype
            ) + (value + index)
        self.broken = False

    def load_weights(self, weights: Iterator[tuple[str, torch.Tensor]]) -> None:
        from vllm.model_executor.model_loader.weight_utils import default_weight_loader

        if self.broken:
            raise ValueError("out of memory")
        own = dict(self.named_parameters())
        for name, weight in weights:
            getattr(own[name], "weight_loader", default_weight_loader)(own[name], weight)

    def same(self, other: Model) -> bool:
        pairs = zip(self.parameters(), other.parameters(), strict=True)
        return all(torch.equal(one, two) for one, two in pairs)


def engine_worker() -> Any:
    """Our extension on the weight transfer of vLLM's worker."""
    from vllm.v1.worker.gpu_worker import Worker

    from rollouter.freshness_worker import FreshnessWorker

    calls = ("init_weight_transfer_engine", "start_weight_update", "update_weights")
    inner = ("_check_weight_transfer_engine", "_start_weight_update")
    names = (*calls, "finish_weight_update", *inner)
    return type("EngineWorker", (FreshnessWorker,), {n: vars(Worker)[n] for n in names})()


class Engine:
    """vLLM's AsyncLLM over workers in threads. ``dead``: its process died in a broadcast."""

    def __init__(self, workers: int, model: type[Model] = Model, device: str = "cpu") -> None:
        from vllm.config.parallel import ParallelConfig
        from vllm.model_executor.model_loader.reload import record_metadata_for_reloading

        from rollouter.transports.engine import ChunkEngine

        self.models = [model(0.0) for _ in range(workers)]
        self.workers: list[Any] = []
        self.threads = [WorkThread(f"worker {rank}") for rank in range(workers)]
        self.version = "0"
        self.dead = self.paused = False
        for rank, one in enumerate(self.models):
            record_metadata_for_reloading(one)
            with contract("vllm.config.parallel.ParallelConfig", "has ranks of all workers"):
                parallel = SimpleNamespace(
                    **{name: getattr(ParallelConfig(), name) for name in ("data_parallel_index",)},
                    world_size=workers,
                    rank=rank,
                )
                assert {"world_size", "rank"} <= ParallelConfig.__dataclass_fields__.keys()
            config: Any = SimpleNamespace(parallel_config=parallel, model_config=None)
            made = ChunkEngine(config, config, torch.device(device), one)
            worker = engine_worker()
            worker.weight_transfer_engine, worker.vllm_config, worker.rank = made, config, rank
            worker.model_runner = SimpleNamespace(reset_lora_state=lambda: None)
            worker._weight_update_active = False
            self.workers.append(worker)

    async def collective_rpc(self, method: str, timeout: Any = None, args: Any = ()) -> list[Any]:
        """As AsyncLLM's: to all workers, through JSON's types."""
        if self.dead and "update_weights" in args:
            raise ProcessDied("student", "its engine died")
        sent = json.loads(json.dumps(args))
        calls = (
            thread.run(getattr(worker, method), *sent)
            for thread, worker in zip(self.threads, self.workers, strict=True)
        )
        return await asyncio.gather(*calls)

    async def update_weight_version(self, version: str) -> None:
        self.version = version

    async def get_weight_version(self) -> str:
        return self.version

    async def pause_generation(self, **_: Any) -> None:
        self.paused = True

    async def resume_generation(self) -> None:
        self.paused = False


def replica(index: int, workers: int) -> Any:
    """A StudentReplica on an Engine."""
    made = replica_on(Engine(workers), f"student/{index}", _transport=nccl, _version=0)
    made.alive = settle
    return made


class Run:
    """A trainer's stage and its replicas, connected by a weight sync."""

    def __init__(self, *workers: int, timeout_s: float = BOUND, rolling: bool = False) -> None:
        self.model = Model(100.0)
        nobody: Any = None
        learner: Any = SimpleNamespace()
        weights = [(name, p.detach().clone()) for name, p in self.model.named_parameters()]
        self.publisher = Publisher(
            lambda: iter(weights), lambda: nccl.NcclSender("", timeout_s, CHUNK)
        )
        self.trainer = TrainerStage(
            learner, self.publisher, nobody, max_version_lag=None, model_dir=""
        )
        self.replicas = [replica(index, count) for index, count in enumerate(workers)]
        named = {f"student/{index}": one for index, one in enumerate(self.replicas)}
        self.members: Any = MemberSet(
            "rollout", named, Policy(supervision=SupervisionConfig(max_restarts=1))
        )
        self.sync = BroadcastSync(
            self.trainer,
            self.members,
            list(workers),
            on_sync="keep",
            timeout_s=BOUND,
            rolling=rolling,
            tries=3,
        )

    async def push(self, version: int = 1) -> Any:
        await self.sync.snapshot(version)
        return await self.sync.push()

    @property
    def lost(self) -> list[int]:
        return [member.index for member in self.members.all if member.failure is not None]

    def has_new_weights(self, index: int) -> bool:
        engine = self.replicas[index]._engine
        return engine.version == "1" and all(self.model.same(model) for model in engine.models)


@pytest.fixture(autouse=True)
def one_process(monkeypatch: pytest.MonkeyPatch, gpu: Gpu) -> None:  # noqa: F811
    """vLLM's config of the process is not a worker's here: workers are threads."""
    from vllm.v1.worker import gpu_worker

    monkeypatch.setattr(gpu_worker, "set_current_vllm_config", lambda _: nullcontext())


# ── what goes to the workers ──────────────────────────────────────────────────────────────────


async def test_all_workers_of_all_replicas_get_all_weights() -> None:
    """Init and update info pass vLLM's Worker and parse_… as the replica makes them."""
    run = Run(2, 1, 4)
    with contract(
        "vllm.v1.worker.gpu_worker.Worker",
        "passes the replica's init_info and update_info on to its weight transfer engine",
    ):
        await run.push()
        assert [run.has_new_weights(index) for index in range(3)] == [True] * 3
    assert run.lost == []


@pytest.mark.parametrize("device", ["cuda", "cpu"])
async def test_only_an_engine_on_a_cpu_holds_all_chunks_at_once(device: str) -> None:
    """Also of a transport through host memory: beside it each GPU's worker would hold a model."""
    seen = []

    class Receiver(chunks.Receiver):
        def receive(self, nbytes: int, timeout_s: float) -> torch.Tensor:
            seen.append("receive")
            return torch.zeros(nbytes, dtype=torch.uint8)

        def close(self) -> None: ...

    class Noting(Model):
        def load_weights(self, weights: Iterator[tuple[str, torch.Tensor]]) -> None:
            seen.append("load")
            super().load_weights(weights)

    worker = Engine(1, Noting, device).workers[0]
    worker.weight_transfer_engine._receiver = Receiver()
    worker.weight_transfer_engine._at = Rendezvous("", 0, 2, BOUND, CHUNK, b"")
    weights = dict(Model(0.0).named_parameters())
    shapes = [list(weight.shape) for weight in weights.values()]
    dtypes = [str(weight.dtype).removeprefix("torch.") for weight in weights.values()]
    worker.start_weight_update()
    worker.update_weights({"names": [*weights], "dtype_names": dtypes, "shapes": shapes})
    alternating = ["receive", "load"] * 3
    assert seen == (alternating if device == "cuda" else sorted(alternating, reverse=True))


async def test_every_worker_has_a_rank_of_its_own(gpu: Gpu) -> None:  # noqa: F811
    """PyNcclCommunicator.from_unique_id_bytes passes them on to ncclCommInitRank."""
    await Run(2, 1, 4).sync.connect()
    (world,) = gpu.worlds.values()
    assert sorted(world.ranks) == list(range(8))


async def test_a_replica_at_a_time_has_its_workers_ranks_from_one_on(gpu: Gpu) -> None:  # noqa: F811
    run = Run(2, 3, rolling=True)
    await run.push()
    assert [sorted(world.ranks) for world in gpu.worlds.values()] == [[0, 1, 2], [0, 1, 2, 3]]
    assert [run.has_new_weights(index) for index in range(2)] == [True, True]


@pytest.mark.parametrize("change", ["missing", "unknown"])
def test_an_info_with_other_fields_is_refused(change: str) -> None:
    """WeightTransferEngine.parse_init_info and parse_update_info."""
    from rollouter.transports.engine import ChunkEngine

    engine: Any = object.__new__(ChunkEngine)
    init = {"rank_offset": 1, "world_size": 2, "module": "m", "at": {}}
    update = {"names": [], "dtype_names": [], "shapes": []}
    for info, parse in ((init, engine.parse_init_info), (update, engine.parse_update_info)):
        name = f"vllm.distributed.weight_transfer.base.WeightTransferEngine.{parse.__name__}"
        with contract(name, "takes exactly the fields of our class, and names another one"):
            parse(info)
            changed: dict[str, Any] = {**info, "more": 1}
            if change == "missing":
                changed = dict(list(info.items())[1:])
            with pytest.raises(ValueError, match="Invalid"):
                parse(changed)


def test_a_communicators_broadcast_takes_a_stream_and_destroy_aborts() -> None:
    """PyNcclCommunicator: what NcclGroup calls of it, and what it must not do by itself."""
    import inspect

    from vllm.distributed.device_communicators.pynccl import PyNcclCommunicator

    of = "vllm.distributed.device_communicators.pynccl.PyNcclCommunicator"
    with contract(f"{of}.broadcast", "takes tensor, src, stream"):
        inspect.signature(PyNcclCommunicator.broadcast).bind(None, "tensor", 0, "stream")
    with contract(f"{of}.destroy", "aborts, from a separate thread, and is not a collective"):
        source = inspect.getsource(PyNcclCommunicator.destroy)
        assert "ncclCommAbort" in source
        assert "Thread" in source
        assert "join(timeout=" in source, "NcclGroup.close waits for a destroy without a bound"
        assert "self.disabled = True" in source


# ── streams ───────────────────────────────────────────────────────────────────────────────────


def streams(gpu: Gpu) -> tuple[Any, Any]:  # noqa: F811
    """This thread's current stream, by torch and by vLLM's own account."""
    from vllm.utils import torch_utils

    return gpu.current_stream(), getattr(torch_utils._current_stream_tls, "value", None)


async def test_vllms_communicator_sets_the_stream_of_the_thread_that_makes_it(
    gpu: Gpu,  # noqa: F811
) -> None:
    """Why ``NcclGroup.joined`` has a separate thread: vllm.utils.torch_utils.current_stream."""
    transport, thread = nccl.NcclSender("", BOUND, CHUNK), WorkThread("any")
    transport.open(2)
    before = await thread.run(streams, gpu)
    gpu.worlds[transport.secret].ranks.append(1)
    with contract("vllm.utils.torch_utils.current_stream", "sets a stream (or needs no thread)"):
        await thread.run(nccl._communicator, transport.secret, 0, 2, "cpu")  # type: ignore[arg-type]
        assert await thread.run(streams, gpu) != before


async def test_connecting_and_sending_keep_the_streams_of_their_threads(
    gpu: Gpu,  # noqa: F811
) -> None:
    run = Run(2)
    sends, works = run.trainer._sending, run.replicas[0]._engine.threads[1]
    before = [await thread.run(streams, gpu) for thread in (sends, works)]
    await run.push()
    after = [await thread.run(streams, gpu) for thread in (sends, works)]
    assert [torchs for torchs, _ in after] == [torchs for torchs, _ in before]
    assert [vllms in (None, torchs) for torchs, vllms in after] == [True, True]


async def test_weights_are_sent_on_another_stream_than_that_of_the_steps(
    gpu: Gpu,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    run, used = Run(1), []
    steps = await run.trainer._computing.run(gpu.current_stream)
    sends = await run.trainer._sending.run(gpu.current_stream)
    broadcast = nccl.NcclGroup.broadcast

    def noted(group: Any, *what: Any) -> None:
        if threading.current_thread().name == "send weights":
            used.append(gpu.current_stream())
        broadcast(group, *what)

    monkeypatch.setattr(nccl.NcclGroup, "broadcast", noted)
    await run.push()
    assert len(set(used)) == 1
    assert not {steps, sends} & set(used)


# ── deaths ────────────────────────────────────────────────────────────────────────────────────


async def test_one_receiver_killed_in_a_broadcast_loses_only_that_one() -> None:
    """NCCL never times out; the others stay paused and receive all in the next round."""
    run = Run(2, 1, 1, timeout_s=SOON)
    await run.sync.connect()
    run.replicas[1]._engine.dead = True
    report = await run.push()  # ProcessDied would be the trainer's, and roll it back
    assert run.lost == [1]
    assert report.metrics["sync/rounds"] == 2
    assert [run.has_new_weights(index) for index in (0, 2)] == [True, True]
    assert [run.replicas[index]._engine.paused for index in (0, 2)] == [False, False]


async def test_one_receiver_killed_before_it_joins_loses_only_that_one() -> None:
    """ncclCommInitRank never times out either."""
    run = Run(1, 1, timeout_s=SOON)

    async def dead(*_: Any) -> None:
        raise ProcessDied("student/1", "its process died")

    run.replicas[1].join = run.replicas[1].alive = dead
    await run.push()
    assert run.lost == [1]
    assert run.has_new_weights(0)


async def test_half_loaded_weights_are_never_sampled_from(monkeypatch: pytest.MonkeyPatch) -> None:
    """The sender dies after two chunks: the replica holds weights of two versions."""
    run = Run(1, timeout_s=SOON)
    await run.sync.connect()
    send, sent = nccl.NcclSender.send, []

    def dies(sender: Any, chunk: Any, timeout_s: float) -> None:
        sent.append(chunk)
        if len(sent) == 3:
            raise ProcessDied("trainer", "its process died")
        send(sender, chunk, timeout_s)

    with monkeypatch.context() as patch:
        patch.setattr(nccl.NcclSender, "send", dies)
        with pytest.raises(ProcessDied):
            await run.push()
    (one,) = run.replicas
    assert one._engine.paused
    assert not one._unpaused.is_set()
    assert run.lost == []
    await run.push()  # the trainer after its restart
    assert run.has_new_weights(0)
    assert not one._engine.paused


async def test_weights_that_reached_one_worker_of_two_are_never_sampled_from(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Worker 0 has received all, worker 1 not the last chunk: the next update begins in both."""
    run = Run(2, timeout_s=SOON)
    await run.sync.connect()
    (one,) = run.replicas
    receive, came = nccl.NcclReceiver.receive, []
    last = one._engine.workers[1].weight_transfer_engine._receiver

    def breaks_off(receiver: Any, nbytes: int, timeout_s: float) -> Any:
        chunk = receive(receiver, nbytes, timeout_s)
        came.append(receiver)
        if receiver is last and came.count(last) == 3:
            raise chunks.BrokenOff("NCCL was aborted")
        return chunk

    mixed = []
    resume = one.resume

    async def resumed() -> None:
        mixed.append(one._mixed)
        await resume()

    monkeypatch.setattr(one, "resume", resumed)
    monkeypatch.setattr(nccl.NcclReceiver, "receive", breaks_off)
    await run.push()
    assert "worker 1: RuntimeError: some weights were replaced" in mixed[0]
    assert mixed[1:] == [""]
    assert run.lost == []
    assert run.has_new_weights(0)


async def test_a_receiver_that_cannot_load_holds_up_no_other() -> None:
    run = Run(1, 2)
    run.replicas[1]._engine.models[1].broken = True
    await run.push()
    assert run.lost == [1]
    assert "out of memory" in str(run.members.all[1].failure)
    assert run.has_new_weights(0)


async def test_an_absent_member_is_waited_for_no_longer_than_the_bound(gpu: Gpu) -> None:  # noqa: F811
    transport = nccl.NcclSender("", 0.05, CHUNK)
    at = transport.open(2)
    with pytest.raises(WeightSyncError, match=r"not all 2 ranks joined the group within 0\.05 s"):
        await asyncio.to_thread(transport.connect)
    gpu.worlds[at.secret].ranks.append(1)  # it comes too late: nobody keeps the communicator
    with gpu.worlds[at.secret].changed:
        gpu.worlds[at.secret].changed.notify_all()
    joining = [t for t in threading.enumerate() if t.name == "join nccl"]
    for thread in joining:
        await asyncio.to_thread(thread.join, BOUND)
    assert gpu.calls["ncclCommAbort"] == 1


async def test_after_an_abort_nothing_seems_to_be_sent(gpu: Gpu) -> None:  # noqa: F811
    """PyNcclCommunicator.broadcast does nothing, without a word, when it is disabled."""
    run = Run(1)
    await run.sync.connect()
    transport: Any = run.publisher._transports[0]
    meta: WeightMeta = run.publisher.snapshot()
    transport._group.close()
    with pytest.raises(chunks.BrokenOff, match="NCCL was aborted"):
        transport.broadcast(run.publisher._snapshot, meta)


async def test_a_communicator_is_aborted_once_although_both_watchdog_and_trainer_close_it(
    gpu: Gpu,  # noqa: F811
) -> None:
    """PyNcclCommunicator.destroy sets ``disabled`` when its abort has returned, not before.

    The broadcast ends earlier than that: the trainer opens the next group during the abort.
    """
    run = Run(1, timeout_s=SOON)
    await run.sync.connect()
    run.publisher.snapshot()
    with pytest.raises(chunks.BrokenOff):
        await asyncio.to_thread(run.publisher.send, 0)  # nobody receives
    run.publisher.open(0, 2)
    assert gpu.calls["ncclCommAbort"] == gpu.calls["ncclCommAbort returned"] == 1


async def test_an_abort_just_before_a_broadcast_begins_waits_until_nccl_has_been_called(
    gpu: Gpu,  # noqa: F811
) -> None:
    """The bound may pass between the look at ``_aborted`` and NCCL's call."""
    run = Run(1)
    await run.sync.connect()
    run.publisher.snapshot()
    group: Any = run.publisher._transports[0]._group  # type: ignore[attr-defined]
    closing = threading.Thread(target=group.close)
    call = group._communicator.broadcast

    def broadcast(*what: Any) -> None:
        closing.start()
        closing.join(ABORT_S / 2)  # long enough for an abort that waits for nothing to begin
        call(*what)

    group._communicator.broadcast = broadcast
    with pytest.raises(chunks.BrokenOff, match="NCCL was aborted"):
        await asyncio.to_thread(run.publisher.send, 0)
    closing.join(BOUND)
    assert (gpu.calls["ncclCommAbort"], gpu.freed_used) == (1, [])


async def test_communicators_are_destroyed_at_both_ends_before_the_next_rendezvous(
    gpu: Gpu,  # noqa: F811
) -> None:
    run = Run(1, 2)
    await run.sync.connect()
    assert gpu.calls["ncclCommAbort"] == 0
    await run.sync.connect()
    assert gpu.calls["ncclCommAbort"] == 4  # of the trainer and three workers


async def test_a_rebuilt_member_leaves_no_group_behind(gpu: Gpu) -> None:  # noqa: F811
    """Its own group, in which it got the newest weights, ends at the next rendezvous of all."""
    run = Run(1, 1)
    await run.push()
    await run.sync.rejoin(1, run.replicas[1], 1)
    assert gpu.calls["ncclCommAbort"] == 2  # the trainer's and its own of the first group
    await run.push(2)
    assert list(run.publisher._transports) == [0]
    assert gpu.calls["ncclCommAbort"] == 5  # both ends of its group, and replica 0's of the first
