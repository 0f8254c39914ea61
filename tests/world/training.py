"""A run of which everything is real but the cluster and the training."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from async_opd import run as module
from async_opd.config.run_config import RunConfig
from async_opd.core.reports import Interval, StageReport
from async_opd.training import Training


class FakeText:
    """Of a model without any token."""

    @classmethod
    def of(cls, config: RunConfig) -> FakeText:
        return cls()

    def response_ends(self) -> tuple[int, ...]:
        return ()


class SavingTrainer:
    """Lives, and saves the model, as a folder."""

    async def report(self) -> StageReport:
        return StageReport()

    async def save(self, directory: str) -> None:
        await asyncio.to_thread(Path(directory).mkdir)

    async def restore(self, directory: str) -> None: ...


class FakeTraining(Training):
    """Trains in no time; then ends with the error it is given, and has no checkpoint of it."""

    error: BaseException | None = None
    trained = has_weights = True
    state_s = 5.0
    trainer: Any = SavingTrainer()

    def __post_init__(self) -> None:
        self.pipeline: Any = SimpleNamespace(
            is_trained=self.trained,
            has_weights=self.has_weights,
            checkpoint=self.checkpoint,
            log_rows=self.log_rows,
            state_s=self.state_s,
        )

    async def run(self) -> None:
        self.job.log.log(1, {"loss/total": 0.5})
        self.job.log.busy({"train": [Interval("step", 1.0, 2.0)]})
        if self.error is not None:
            raise self.error

    async def checkpoint(self) -> None:
        raise ValueError("no checkpoint of this")

    def log_rows(self) -> None:
        self.job.log.log(2, {"loss/total": 0.25})


def fake_training(monkeypatch: pytest.MonkeyPatch) -> type[FakeTraining]:
    """The training of all runs from now on, whose attributes a test may set."""

    class Own(FakeTraining):
        pass

    @asynccontextmanager
    async def launch(*_: Any, **__: Any) -> AsyncIterator[Any]:
        trainer = Own.trainer
        yield SimpleNamespace(trainer=trainer, save_early=trainer.save, watched=lambda work: work)

    monkeypatch.setattr(module, "launch", launch)
    monkeypatch.setattr(module, "Training", Own)
    monkeypatch.setattr(module, "Text", FakeText)
    return Own
