"""The Ray shell: errors, deaths and endless waits of a process arrive as ours, with its name."""

from __future__ import annotations

import asyncio
import multiprocessing
import os
import subprocess
import sys
from collections.abc import Iterator
from functools import partial

import pytest
import ray

from async_opd.cluster.remote import Remote
from async_opd.core.errors import EngineStartError, StageError, StageTimeout
from tests.world.ray_cluster import started

pytestmark = pytest.mark.engine


class Victim:
    """The object that the tests put into an ActorShell."""

    def __init__(self, fail: bool = False) -> None:
        if fail:
            print("an error in its log", file=sys.stderr)
            raise RuntimeError("no such model")

    async def answer(self) -> int:
        return 42

    async def fail(self) -> None:
        raise ValueError("bad value")

    async def fail_in_a_group(self) -> None:
        async with asyncio.TaskGroup() as group:
            group.create_task(self._stage_error())

    async def _stage_error(self) -> None:
        raise StageError("inner", "broke", "mend it")

    async def hang(self) -> None:
        await asyncio.Event().wait()

    async def die(self) -> None:
        os._exit(1)

    async def exit_codes_of_children(self, code: str) -> list[int | None]:
        """Of a process as vLLM starts its engines, and of one as it asks for models."""
        engine = multiprocessing.get_context("spawn").Process(target=exec, args=(code,))
        engine.start()
        await asyncio.to_thread(engine.join)
        command = [sys.executable, "-c", code]
        return [engine.exitcode, await asyncio.to_thread(subprocess.call, command)]


VICTIM = f"{__name__}:Victim"
BOUND_S = 300.0
"""Many times what a process takes to start beside others, or to import torch and transformers."""


@pytest.fixture(scope="module")
def cluster() -> Iterator[None]:
    env = {"env_vars": {"PYTHONPATH": os.getcwd()}}
    local = {"address": "local", "include_dashboard": False, "log_to_driver": False}
    started(partial(ray.init, **local, runtime_env=env))
    yield
    ray.shutdown()


@pytest.fixture(scope="module")
def victim(cluster: None) -> Remote:
    """One process for all calls after which it lives."""
    return asyncio.run(built())


async def built() -> Remote:
    remote = Remote.create("victim", timeout_s=BOUND_S)
    await remote.build(VICTIM, (), BOUND_S)
    return remote


@pytest.mark.usefixtures("cluster")
class TestRemote:
    async def test_a_call_returns_the_answer_or_an_error_with_its_cause(
        self, victim: Remote
    ) -> None:
        assert await victim.call("answer") == 42
        with pytest.raises(StageError, match="victim: fail failed: ValueError: bad value"):
            await victim.call("fail")
        with pytest.raises(StageError, match="inner: broke"):  # our own: as it is
            await victim.call("fail_in_a_group")

    async def test_an_endless_call_ends_in_a_timeout(self, victim: Remote) -> None:
        with pytest.raises(StageTimeout, match=r"hang took longer than 0\.5 s"):
            await victim.call("hang", timeout_s=0.5)

    async def test_a_dead_process_is_named(self) -> None:
        with pytest.raises(StageError, match="victim: its process died during die"):
            await (await built()).call("die")

    async def test_a_process_reaches_another_one_before_and_after_its_restart(
        self, victim: Remote
    ) -> None:
        other = Remote.create("other", timeout_s=BOUND_S, restarts=True)
        await victim.reach(other, BOUND_S)
        other.restart()
        await victim.reach(other, BOUND_S)
        other.kill()
        with pytest.raises(StageError, match="other: its process died"):
            await victim.reach(other, BOUND_S)

    async def test_children_of_a_process_without_the_drivers_path_import_torchvision(
        self, victim: Remote
    ) -> None:
        imports = "import torchvision; import transformers.image_utils"
        assert await victim.call("exit_codes_of_children", imports) == [0, 0]

    async def test_an_object_that_cannot_be_built_is_an_error_with_words_of_its_log(self) -> None:
        remote = Remote.create("victim", timeout_s=BOUND_S)
        with pytest.raises(EngineStartError, match=r"(?s)no such model.*an error in its log"):
            await remote.build(VICTIM, (True,), BOUND_S)


def test_rays_token_authentication_is_on(cluster: None) -> None:
    from ray._private.authentication.authentication_utils import is_token_auth_enabled

    assert is_token_auth_enabled()
