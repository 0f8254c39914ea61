"""The answers of an engine's workers after a method failed in some: vLLM's, and ours.

Real are vLLM's executor and the loop of its workers; the queues between them are lists here.
"""

from __future__ import annotations

import ast
import inspect
from collections import deque
from collections.abc import Iterator
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest

from async_opd.core.errors import WorkersFailed
from async_opd.processes.engine_workers import FaultReturningWorker, on_workers
from tests.contracts import PACKAGES, ROOT, contract

pytestmark = pytest.mark.slow  # imports vllm

EXECUTOR = "vllm.v1.executor.multiproc_executor.MultiprocExecutor"


class Worker(FaultReturningWorker):
    """Fails to receive if it is ``broken``, and to wake up if that is its rank."""

    def __init__(self, rank: int, broken: bool) -> None:
        self.rank, self.broken = rank, broken

    def receive(self) -> int:
        if self.broken:
            raise RuntimeError(f"worker {self.rank}: the broadcast broke off")
        return self.rank

    def name(self) -> str:
        return f"worker {self.rank}"

    def sleep(self, level: int) -> None: ...

    def wake_up(self, tags: Any = None) -> None:
        if self.broken:
            raise MemoryError(f"no room on GPU {self.rank}")


class Queue:
    """vLLM's MessageQueue, without shared memory."""

    def __init__(self) -> None:
        self.items: deque[Any] = deque()

    def enqueue(self, item: Any) -> None:
        self.items.append(item)

    def dequeue(self, timeout: float | None = None) -> Any:
        return self.items.popleft()


class Engine:
    """AsyncLLM over vLLM's executor and the busy loops of its workers."""

    def __init__(self, *broken: bool) -> None:
        from vllm.v1.executor.multiproc_executor import MultiprocExecutor, WorkerProc

        self.procs: list[Any] = []
        for rank, one in enumerate(broken):
            proc: Any = object.__new__(WorkerProc)
            proc.rank, proc.use_async_scheduling, proc.worker_response_mq = rank, False, Queue()
            proc.worker = Worker(rank, one)
            self.procs.append(proc)
        self.executor: Any = object.__new__(MultiprocExecutor)
        self.executor.is_failed, self.executor.futures_queue = False, deque()
        self.executor.rpc_broadcast_mq = SimpleNamespace(enqueue=self.broadcast)
        self.executor.response_mqs = [proc.worker_response_mq for proc in self.procs]
        self.executor.sleeping_tags = set()

    def broadcast(self, request: Any) -> None:
        for proc in self.procs:
            proc._execute_worker_rpc(request)

    async def collective_rpc(
        self, method: str, timeout: float | None = None, args: tuple[Any, ...] = ()
    ) -> Any:
        return self.executor.collective_rpc(method, timeout, args)


async def test_answers_of_other_workers_stay_behind_when_a_method_raises() -> None:
    """Why nothing of ours raises in a worker. Once vLLM drains its queues, ``attempt`` can go."""
    engine = Engine(True, True)
    with contract(
        f"{EXECUTOR}.collective_rpc", "gives stale answers (or ``attempt`` is needed no more)"
    ):
        with pytest.raises(RuntimeError, match="worker 0: the broadcast broke off"):
            await engine.collective_rpc("receive")
        with pytest.raises(RuntimeError, match="worker 1: the broadcast broke off"):
            await engine.collective_rpc("name")


async def test_after_a_fault_that_is_returned_each_answer_belongs_to_its_call() -> None:
    engine = Engine(True, False, True)
    with pytest.raises(WorkersFailed, match="receive failed in its engine") as raised:
        await on_workers(engine, "student/0", "receive")
    assert [bool(fault) for fault in raised.value.faults] == [True, False, True]
    assert await on_workers(engine, "student/0", "name") == ["worker 0", "worker 1", "worker 2"]


async def test_an_engine_that_fails_to_wake_up_in_one_worker_fails_ever_after() -> None:
    """vLLM's executor itself calls ``sleep`` and ``wake_up`` in the workers, by these names."""
    engine = Engine(False, True)
    check = partial(on_workers, engine, "teacher/0", "refuse_broken_sleep")
    await check()
    with contract(f"{EXECUTOR}.sleep and wake_up", "call these methods of each worker, by name"):
        engine.executor.sleep(level=1)
        await check()
        engine.executor.wake_up()
    for _ in range(2):
        with pytest.raises(WorkersFailed, match="worker 1: MemoryError: no room on GPU 1"):
            await check()


def test_a_method_of_an_engines_worker_reaches_the_instance_through_its_wrapper() -> None:
    """``sleep`` and ``wake_up`` are attributes of the worker that ``refuse_broken_sleep`` sets."""
    from vllm.v1.worker.worker_base import WorkerWrapperBase

    with contract(
        "vllm.v1.worker.worker_base.WorkerWrapperBase", "passes sleep and wake_up on to its worker"
    ):
        assert not {"sleep", "wake_up", "attempt"} & set(dir(WorkerWrapperBase))
        assert "getattr(self.worker, attr)" in inspect.getsource(WorkerWrapperBase.__getattr__)


@pytest.mark.parametrize(
    "worker",
    ["rollouter.freshness_worker.FreshnessWorker", "teachers.scoring_worker.ScoringWorker"],
)
def test_the_workers_of_our_engines_return_their_faults(worker: str) -> None:
    from vllm.utils.import_utils import resolve_obj_by_qualname

    assert issubclass(resolve_obj_by_qualname(worker), FaultReturningWorker)


def test_no_module_of_ours_calls_workers_but_through_on_workers() -> None:
    """Then no method of a worker can raise inside of it, whichever methods there are."""
    from vllm.v1.engine.async_llm import AsyncLLM

    calls = {"collective_rpc"} | {
        name
        for name, method in vars(AsyncLLM).items()
        if "self.collective_rpc(" in (inspect.getsource(method) if callable(method) else "")
    }
    assert {"init_weight_transfer_engine", "update_weights", "finish_weight_update"} <= calls
    assert sorted(uses(calls)) == ["async_opd/processes/engine_workers.py: engine.collective_rpc"]


def uses(names: set[str]) -> Iterator[str]:
    """Where our modules use such an attribute of an engine."""
    for path in (
        path for name in (*PACKAGES, "benchmarks") for path in (ROOT / name).rglob("*.py")
    ):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Attribute) and node.attr in names:
                owner = ast.unparse(node.value)
                if owner.endswith("_engine") or node.attr == "collective_rpc":
                    yield f"{path.relative_to(ROOT)}: {owner}.{node.attr}"
