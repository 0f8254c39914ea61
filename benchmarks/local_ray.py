"""A local Ray cluster for a benchmark, started as a run starts its own.

A raylet that waits too long for its agent ends (15 s, which no setting changes): such a start is
repeated, as an overloaded machine can be too slow for a while.
"""

from __future__ import annotations

import sys
from collections.abc import Coroutine
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import uvloop

from async_opd.cluster.session import ray_session
from async_opd.config.load import load_config

Result = TypeVar("Result")
EXAMPLE = Path(__file__).parents[1] / "examples" / "quickstart.yaml"


def on_local_ray(work: Coroutine[Any, Any, Result]) -> Result:
    """The result of ``work``, which runs while the cluster is up.

    Raises:
        StageError: Ray has not started within ``timeouts.engine_start_s`` of the quickstart.
    """

    async def session() -> Result:
        try:
            async with ray_session(load_config(EXAMPLE), partial(print, file=sys.stderr)):
                return await work
        finally:
            work.close()

    return uvloop.run(session())
