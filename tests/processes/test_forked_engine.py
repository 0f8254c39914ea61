"""The process of an engine is a fork of its actor's, which ends with it and keeps nothing of it."""

from __future__ import annotations

import gc
import multiprocessing
import os
import signal
import socket
import subprocess
import sys
from types import ModuleType
from typing import Any

import psutil
import pytest

from async_opd.processes.forked_engine import forked_engine
from tests.processes.test_signals import is_gone

PROGRAM = """
import multiprocessing, os, time
from types import SimpleNamespace
from async_opd.processes.forked_engine import forked_engine

def engine():
    print(os.getpid(), flush=True)
    time.sleep(60)

os.environ["ASYNC_OPD_ACTOR"] = "student/0"
vllm = SimpleNamespace(get_mp_context=multiprocessing.get_context)
with forked_engine(vllm, on_cpu=True):
    process = vllm.get_mp_context().Process(target=engine, name="EngineCore")
    process.start()
process.join()
"""


def launcher() -> Any:
    """A stand-in for ``vllm.v1.engine.utils``."""
    made: Any = ModuleType("utils")
    made.get_mp_context = multiprocessing.get_context
    return made


@pytest.fixture
def actor(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ASYNC_OPD_ACTOR", "student/0")


def started(work: Any, *args: Any) -> Any:
    """A process of an engine on a CPU."""
    vllm = launcher()
    with forked_engine(vllm, on_cpu=True):
        process = vllm.get_mp_context().Process(target=work, args=args, name="EngineCore")
        process.start()
    return process


def wait_for(pipe: Any) -> None:
    pipe.recv()


def test_an_engine_ends_when_its_actor_is_killed() -> None:
    parent = subprocess.Popen([sys.executable, "-c", PROGRAM], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    child = int(parent.stdout.readline())
    os.kill(parent.pid, signal.SIGKILL)
    parent.wait(30)
    assert is_gone(child)


@pytest.mark.usefixtures("actor")
def test_sockets_of_the_actor_close_with_the_actor_although_its_engine_lives() -> None:
    end, other = socket.socketpair()
    there, here = multiprocessing.Pipe(duplex=False)
    with other:
        process = started(wait_for, there)
        other.settimeout(30)
        end.close()
        assert other.recv(1) == b""
    here.send("done")
    process.join(30)
    assert process.exitcode == 0


@pytest.mark.usefixtures("actor")
def test_an_engine_has_its_name_beside_that_of_its_actor() -> None:
    here, there = multiprocessing.Pipe(duplex=False)

    def tell() -> None:
        there.send(psutil.Process().name())

    process = started(tell)
    assert here.poll(30)
    assert here.recv() == "EngineCore"
    process.join(30)


@pytest.mark.usefixtures("actor")
def test_an_engine_collects_no_object_of_its_actor_also_at_its_end() -> None:
    """vLLM gives frozen objects back to the collector when an engine ends."""
    here, there = multiprocessing.Pipe(duplex=False)
    actor = os.getpid()

    class Handle:
        def __del__(self) -> None:
            if os.getpid() != actor:
                there.send("collected")

    def end() -> None:
        gc.unfreeze()
        gc.collect()
        there.send("ended")

    gc.disable()
    handle: Any = Handle()
    handle.itself = handle
    del handle
    process = started(end)
    gc.disable()
    assert here.recv() == "ended"
    process.join(30)
    gc.enable()


@pytest.mark.usefixtures("actor")
def test_a_socket_of_the_actor_that_ends_in_its_engine_closes_nothing_of_the_engine() -> None:
    end, other = socket.socketpair()
    here, there = multiprocessing.Pipe(duplex=False)

    def tell() -> None:
        reading, writing = os.pipe()
        end.close()
        os.write(writing, b"1")
        there.send(os.read(reading, 1))

    with end, other:
        process = started(tell)
        assert here.poll(30)
        assert here.recv() == b"1"
        process.join(30)


@pytest.mark.parametrize(("name", "on_cpu"), [("student/0", False), (None, True)])
def test_on_a_gpu_and_outside_of_actors_vllm_starts_its_processes_itself(
    name: str | None, on_cpu: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("ASYNC_OPD_ACTOR", raising=False)
    if name is not None:
        monkeypatch.setenv("ASYNC_OPD_ACTOR", name)
    vllm = launcher()
    with forked_engine(vllm, on_cpu):
        assert vllm.get_mp_context is multiprocessing.get_context


@pytest.mark.usefixtures("actor")
def test_afterwards_vllm_has_its_own_function_again() -> None:
    vllm = launcher()
    with pytest.raises(KeyError), forked_engine(vllm, on_cpu=True):
        raise KeyError("the engine did not start")
    assert vllm.get_mp_context is multiprocessing.get_context
