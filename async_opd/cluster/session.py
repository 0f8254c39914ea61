"""A Ray cluster for the time of a run: a local one, or an existing one to join."""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import ray

from async_opd.core.config import RunConfig
from async_opd.core.errors import StageError


@asynccontextmanager
async def ray_session(config: RunConfig) -> AsyncIterator[None]:
    """Starts or joins the cluster; shuts our part of it down on the way out.

    Ray's token authentication stays as it is (on by default).
    """
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    address = config.cluster.address or "local"
    try:
        async with asyncio.timeout(config.timeouts.engine_start_s):
            await asyncio.to_thread(
                ray.init,
                address=address,
                include_dashboard=False if address == "local" else None,
                log_to_driver=False,
                logging_level=logging.ERROR,
                configure_logging=False,
            )
    except (ConnectionError, RuntimeError, TimeoutError) as error:
        raise StageError(
            "cluster",
            f"no Ray cluster at {address!r}: {type(error).__name__}: {error}",
            "check cluster.address, or leave it out for a local cluster; a cluster with token "
            "authentication is joined with RAY_AUTH_MODE=token and its token (RAY_AUTH_TOKEN)",
        ) from error
    try:
        yield
    finally:
        await asyncio.to_thread(ray.shutdown)
