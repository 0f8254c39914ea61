"""Trackio: a run in its own local database (TRACKIO_DIR), which ``trackio show`` shows."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from async_opd.config.run_config import RunConfig
from async_opd.config.secrets import without_secrets
from async_opd.observability.sinks import Summary


class Trackio:
    """One Trackio run of the project ``log.project``; a resumed run adds to it.

    Trackio knows runs by their names: those of several run directories end with different ids.
    """

    def __init__(self, config: RunConfig, run_id: str) -> None:
        import trackio

        self._run: Any = trackio.init(
            project=config.log.project,
            name=f"{config.name}-{run_id}",
            config=without_secrets(config.model_dump(mode="json", by_alias=True)),
            resume="allow",
            embed=False,
            auto_log_gpu=False,
            auto_log_cpu=False,
        )

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        """Logs the values."""
        self._run.log(dict(metrics), step=step)

    def end(self, summary: Summary) -> None:
        """Waits until all is in the database."""
        self._run.finish()
