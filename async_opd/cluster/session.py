"""A Ray cluster for the time of a run: a local one, or an existing one to join."""

from __future__ import annotations

import asyncio
import logging
import os
import sys
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager, nullcontext, suppress
from functools import partial
from threading import Event, Thread

import ray
from ray.job_config import JobConfig

from async_opd.core.config import RunConfig
from async_opd.core.errors import StageError
from async_opd.core.family import Family, family
from async_opd.core.orphans import SAFE_PATH


@asynccontextmanager
async def ray_session(config: RunConfig) -> AsyncIterator[Family | None]:
    """Starts or joins the cluster; shuts our part of it down on the way out.

    What a local one starts is a family, whose head and agents are noted by who knows when all are
    there.

    Processes that Ray starts import nothing from the working directory by themselves.

    Ray's token authentication stays as it is (on by default).
    """
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    address = config.cluster.address or "local"
    with family() if address == "local" else nullcontext() as ours, _safe_path():
        await _start(config, address)
        try:
            yield ours
        finally:
            try:
                async with asyncio.timeout(config.timeouts.shutdown_s):
                    await _in_a_daemon(ray.shutdown)
            except TimeoutError:  # a joined cluster sees to what was ours in it
                if ours is not None:
                    await asyncio.to_thread(ours.end)


@contextmanager
def _safe_path() -> Iterator[None]:
    """Processes that are started meanwhile do not import from the working directory."""
    before = os.environ.get(SAFE_PATH)
    os.environ[SAFE_PATH] = "1"
    try:
        yield
    finally:
        os.environ.pop(SAFE_PATH)
        if before is not None:
            os.environ[SAFE_PATH] = before


class _JobConfig(JobConfig):
    """One of which Ray believes that it says where workers import from.

    Otherwise it adds the working directory to their paths, where a module of a downloaded folder
    would be taken for one of ours, or of a library's.
    """

    def _runtime_env_has_working_dir(self) -> bool:
        return True


def job_config() -> JobConfig:
    """Workers import from where the driver itself does: its script's folder, and what it was told.

    ``PYTHONPATH`` and what is installed they know by themselves.
    """
    script, here = os.path.dirname(os.path.realpath(sys.argv[0])), os.getcwd()
    told = [path for path in dict.fromkeys((script, here)) if path in sys.path]
    return _JobConfig(_py_driver_sys_path=told)


async def _start(config: RunConfig, address: str) -> None:
    try:
        async with asyncio.timeout(config.timeouts.engine_start_s):
            await _in_a_daemon(
                partial(
                    ray.init,
                    address=address,
                    job_config=job_config(),
                    include_dashboard=False if address == "local" else None,
                    log_to_driver=False,
                    logging_level=logging.ERROR,
                    configure_logging=False,
                )
            )
    except (ConnectionError, RuntimeError, TimeoutError) as error:
        raise StageError(
            "cluster",
            f"no Ray cluster at {address!r}: {type(error).__name__}: {error}",
            "check cluster.address, or leave it out for a local cluster; a cluster with token "
            "authentication is joined with RAY_AUTH_MODE=token and its token (RAY_AUTH_TOKEN)",
        ) from error


async def _in_a_daemon(work: Callable[[], object]) -> None:
    """Waits for a blocking call in a thread that holds up no exit, should the wait end before.

    The thread outlives the call: processes that Ray started die with the thread that started them.
    """
    loop, done = asyncio.get_running_loop(), asyncio.Event()
    errors: list[BaseException] = []

    def body() -> None:
        try:
            work()
        except BaseException as error:
            errors.append(error)
        with suppress(RuntimeError):  # nobody waits any more
            loop.call_soon_threadsafe(done.set)
        Event().wait()

    Thread(target=body, name="ray", daemon=True).start()
    await done.wait()
    if errors:
        raise errors[0]
