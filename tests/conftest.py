"""Builders shared by the tests, and in which order and how quickly these are collected."""

from __future__ import annotations

import atexit
import gc
import os
from collections.abc import Iterator
from functools import cache
from typing import TYPE_CHECKING

import numpy as np
import pytest

import tests.properties  # noqa: F401 - registers the profiles before any test has settings
from async_opd.core.samples import Prompt, Rollout, Sample, VersionSpan
from async_opd.core.scores import SampledLogprobs

if TYPE_CHECKING:
    from tests.world.cli import Cli
    from tests.world.training import FakeTraining

# Ray gives its workers niceness 15. A test beside them that computes in a process of its own takes
# 28 times their share of a core: engines that start in a minute alone then took more than ten.
os.environ.setdefault("RAY_worker_niceness", "0")
# Two or three workers of xdist share two cores, and torch has as many threads in each.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[None]:
    """Collects without garbage collection, and leaves what was imported out of every later one.

    Of 18 s of processor time in each of xdist's workers, 7 were the collector's, which finds
    nothing among the modules of torch, transformers and Ray; the tests' own time is a tenth less.
    Later collections come after 20,000 new objects, not 700: a twentieth less.
    """
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.set_threshold(20_000)
        gc.enable()


def pytest_configure(config: pytest.Config) -> None:
    """A worker of xdist ends without freeing its modules, which takes 5 s of processor time.

    Other processes give them back to the collector last: nanobind reports those that it never
    frees.
    """
    if hasattr(config, "workerinput"):
        worker = os.getpid()  # children that a test forks keep their exit codes
        atexit.register(lambda: os.getpid() == worker and os._exit(0))
    else:
        atexit.register(gc.unfreeze)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Modules with slow tests come first: xdist's workers then end at about the same time."""
    slow = {item.path for item in items if item.get_closest_marker("slow")}
    items.sort(key=lambda item: item.path not in slow)


@pytest.fixture
def torch_for_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    """PyTorch counts as one that can use GPUs, whatever is installed."""
    from async_opd.checks import resources

    monkeypatch.setattr(resources, "installed", lambda name: "2.13.0+cu130")


@pytest.fixture(scope="session")
def one_bundle() -> Iterator[None]:
    """All pages of the process have one bundle of Vega's scripts, each of which takes 2 s."""
    vl_convert = pytest.importorskip("vl_convert", reason="the extra report is not installed")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(vl_convert, "javascript_bundle", cache(vl_convert.javascript_bundle))
        yield


def make_prompt(uid: str = "p", teacher: str = "t", tokens: int = 3) -> Prompt:
    """A prompt of ``tokens`` tokens."""
    return Prompt(uid, teacher, teacher, np.arange(tokens, dtype=np.int32))


def make_rollout(
    uid: str = "p/0", teacher: str = "t", tokens: int = 4, version: int = 0, prompt_tokens: int = 3
) -> Rollout:
    """A rollout of ``tokens`` response tokens, all of one version."""
    return Rollout.plain(
        uid=uid,
        prompt=make_prompt(uid.rpartition("/")[0], teacher, prompt_tokens),
        response_ids=np.arange(tokens, dtype=np.int32),
        rollout_logprobs=np.full(tokens, -1.0, dtype=np.float32),
        version_spans=(VersionSpan(version, 0, tokens),) if tokens else (),
        finish_reason="stop",
    )


def make_sample(uid: str = "p/0", tokens: int = 4, version: int = 0) -> Sample:
    """A scored rollout."""
    rollout = make_rollout(uid, tokens=tokens, version=version)
    return Sample(rollout, SampledLogprobs(np.full(tokens, -0.5, dtype=np.float32)))


@pytest.fixture(scope="session")
def engines_fork() -> Iterator[None]:
    """Engines of the tests' own process start from one that has imported vLLM once and for all.

    In place of an interpreter each, as vLLM starts them: 8 s of processor time less per engine.
    """
    from multiprocessing import get_context

    from vllm.v1.engine import utils

    import tests.engines  # noqa: F401 - the environment, before vllm is imported

    context = get_context("forkserver")
    context.set_forkserver_preload(["vllm.v1.engine.core", "vllm.v1.worker.cpu_worker"])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(utils, "get_mp_context", lambda: context)
        yield


@pytest.fixture
def quickstart() -> str:
    """The folder with the quickstart's models and data."""
    from pathlib import Path

    return str(Path(__file__).parent.parent / "examples" / "quickstart")


@pytest.fixture
def cli(capsys: pytest.CaptureFixture[str]) -> Cli:
    """Runs commands of async_opd; returns what they print."""
    from tests.world.cli import Cli

    return Cli(capsys)


@pytest.fixture
def empty_store() -> Iterator[None]:
    """Nothing is behind ``memory://`` URLs, before a test and after it."""
    from fsspec.implementations.memory import MemoryFileSystem

    MemoryFileSystem.store.clear()
    yield
    MemoryFileSystem.store.clear()


@pytest.fixture
def distilling(monkeypatch: pytest.MonkeyPatch) -> type[FakeTraining]:
    """The training of a run of which everything else is real but the cluster."""
    from tests.world.training import fake_training

    return fake_training(monkeypatch)
