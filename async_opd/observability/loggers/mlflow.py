"""MLflow: a run on the server of MLFLOW_TRACKING_URI, or in ``run_dir/mlflow``."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from pathlib import Path

from async_opd.config.run_config import RunConfig
from async_opd.config.secrets import without_secrets
from async_opd.core.nesting import leaves
from async_opd.files.safe_open import make_folder
from async_opd.observability.sinks import Summary

MOST, MOST_PARAMS = 1000, 100
"""Metrics and parameters in one call, by MLflow's own limits."""
LONGEST = 500
"""Characters of a parameter's value."""


class MLflow:
    """One MLflow run of the experiment ``log.project``; a resumed run is another one."""

    def __init__(self, config: RunConfig, run_dir: Path) -> None:
        os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")
        from mlflow import MlflowClient
        from mlflow.entities import Param

        uri = os.environ.get("MLFLOW_TRACKING_URI")
        if not uri:  # files need no database, but MLflow 3 wants to be asked for them
            os.environ.setdefault("MLFLOW_ALLOW_FILE_STORE", "true")
            make_folder(run_dir / "mlflow")  # raises if it is a link
            uri = (run_dir.absolute() / "mlflow").as_uri()
        self._client = MlflowClient(tracking_uri=uri)
        known = self._client.get_experiment_by_name(config.log.project)
        experiment = (
            known.experiment_id if known else self._client.create_experiment(config.log.project)
        )
        self._run = self._client.create_run(experiment, run_name=config.name).info.run_id
        values = leaves(without_secrets(config.model_dump(mode="json", by_alias=True)))
        self._params = [Param(_name(key), str(value)[:LONGEST]) for key, value in values]

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        """Logs the values; ``@`` in a key, which MLflow refuses, becomes ``_at_``.

        The config is logged after the first ones, or when the server takes it: a constructor that
        raised for it would be called again, for another run.
        """
        from mlflow.entities import Metric

        now = int(time.time() * 1000)
        rows = [Metric(_name(key), value, now, step) for key, value in metrics.items()]
        for start in range(0, len(rows), MOST):
            self._client.log_batch(self._run, metrics=rows[start : start + MOST])
        while self._params:
            self._client.log_batch(self._run, params=self._params[:MOST_PARAMS])
            del self._params[:MOST_PARAMS]

    def end(self, summary: Summary) -> None:
        """Sets the run's status."""
        ends = {"completed": "FINISHED", "failed": "FAILED", "interrupted": "KILLED"}
        self._client.set_terminated(self._run, ends[summary.status])


def _name(key: str) -> str:
    """The key with the characters that MLflow accepts."""
    parts = key.replace("@", "_at_")
    return "".join(one if one.isalnum() or one in "_-. /" else "_" for one in parts)
