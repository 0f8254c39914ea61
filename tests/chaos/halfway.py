"""``async_opd run`` whose weight sync stops after its first chunk, once, when a test asks for it.

python -m tests.chaos.halfway FOLDER run CONFIG …

test: FOLDER/armed ──► trainer: FOLDER/halfway, the broadcast stands ──► test: FOLDER/go
"""

from __future__ import annotations

import sys
import time
from functools import partial
from pathlib import Path
from typing import Any

import async_opd.run as run_module
from async_opd.cli import main
from async_opd.cluster.actor_factory import Factories, Factory
from async_opd.cluster.launch import launch
from async_opd.cluster.trainer_actor import build_trainer as real_trainer
from async_opd.config.run_config import RunConfig
from async_opd.core.stages import Queue
from async_opd.models.engine_args import Device
from async_opd.weight_sync.layout import WeightMeta, chunk_plan
from rollouter.transports import gloo
from trainer.stage import TrainerStage

PATIENCE_S = 6.0
"""Below the bound of the collective: ranks that are left still get their answers."""


class Halfway(gloo.GlooSender):
    """Stops after the first chunk if it finds the file ``armed``."""

    def __init__(self, folder: Path, *args: Any) -> None:
        super().__init__(*args)
        self.folder = folder

    def broadcast(self, weights: list[Any], meta: WeightMeta) -> float:
        assert len(chunk_plan(meta.sizes, self.chunk_bytes)) > 1, "one chunk has no middle"
        return super().broadcast(weights, meta)

    def send(self, chunk: Any, timeout_s: float) -> None:
        super().send(chunk, timeout_s)
        self.stand()

    def stand(self) -> None:
        """Until the test has done what it wants to."""
        if (self.folder / "armed").exists():
            (self.folder / "armed").rename(self.folder / "halfway")
            end = time.monotonic() + PATIENCE_S
            while not (self.folder / "go").exists() and time.monotonic() < end:
                time.sleep(0.01)


def build_trainer(config: RunConfig, device: Device, queue: Queue, folder: str) -> TrainerStage:
    """The real one, over this transport."""
    gloo.sender = partial(Halfway, Path(folder))  # type: ignore[assignment]
    return real_trainer(config, device, queue)


if __name__ == "__main__":
    trainer = Factory("tests.chaos.halfway:build_trainer", (sys.argv[1],))
    run_module.launch = partial(launch, factories=Factories(trainer=trainer))  # type: ignore[assignment]
    sys.exit(main(sys.argv[2:]))
