"""A small run whose engines and learner only take time; its actors are real.

python -m tests.cluster.simulated run CONFIG …   is async_opd with such engines and such a learner
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import async_opd.run as run_module
from async_opd.cli import main
from async_opd.cluster.actor_factory import Factories, Factory
from async_opd.cluster.launch import launch
from async_opd.config.run_config import RunConfig
from async_opd.config.sections.plan import RolloutPlan, TeacherPlan, TrainPlan
from async_opd.core.reports import WrittenFile
from async_opd.core.samples import Sample
from async_opd.core.stages import Queue
from async_opd.files.durable import written_file
from async_opd.tools.plan.setting import Lengths
from benchmarks.simulated.trainer import SimulatedLearner, build_simulated_trainer
from trainer.learner import LearnerReport
from trainer.stage import TrainerStage

FACTORIES = Factories(
    student=Factory(
        "benchmarks.simulated.replicas:SimulatedStudent",
        (RolloutPlan(step_s=1e-3), 16, Lengths(16, 0.3, 64), 0.01),
    ),
    teacher=Factory(
        "benchmarks.simulated.replicas:SimulatedTeacher",
        (TeacherPlan(overhead_s=1e-3, tokens_per_s=1e6), 0),
    ),
    trainer=Factory(
        "benchmarks.simulated.trainer:build_simulated_trainer",
        (TrainPlan(overhead_s=0.02, tokens_per_s=1e9),),
    ),
)
STATE = "state.json"
"""The trainer's state, in a checkpoint and in the model."""
HURRY = "hurry"
"""A file in the run directory: its steps take no longer than ``FACTORIES`` says."""


class KeptLearner(SimulatedLearner):
    """Its state is the number of its steps."""

    steps = version = captured = 0

    def __init__(self, speed: TrainPlan, hurry: Path) -> None:
        super().__init__(speed)
        self._hurry = hurry

    def train_batch(self, samples: Sequence[Sample], images: object = None) -> LearnerReport:
        self.steps += 1
        if self._hurry.exists():
            self._speed = FACTORIES.trainer.extra[0]
        return super().train_batch(samples, images)

    def capture(self, version: int) -> int:
        self.captured = self.steps
        return 8

    def write(self, directory: str) -> Mapping[str, WrittenFile]:
        path = Path(directory) / STATE
        path.write_text(json.dumps({"step": self.captured, "version": self.version}))
        return {STATE: written_file(path)}

    def restore(self, directory: str) -> tuple[int, int]:
        found = json.loads((Path(directory) / STATE).read_text())
        self.steps = found["step"]
        return found["step"], found["version"]

    def save(self, model_dir: str, directory: str) -> None:
        Path(directory).mkdir(exist_ok=True)
        (Path(directory) / STATE).write_text(json.dumps({"step": self.steps}))


def build_trainer(config: RunConfig, device: str, queue: Queue, speed: TrainPlan) -> TrainerStage:
    """The simulated one, with checkpoints; a ``plan`` of the config gives its speed."""
    speed = config.plan.train if config.plan else speed
    stage = build_simulated_trainer(config, device, queue, speed)
    stage._learner = KeptLearner(speed, Path(config.run_dir or "") / HURRY)  # type: ignore[assignment]
    return stage


def config(run_dir: Path, **sections: Any) -> RunConfig:
    """Two replicas of the student and two of the teacher ``t``."""
    engine = {"engine": {"max_num_seqs": 16}}
    smallest = {
        "name": "simulated",
        "run_dir": str(run_dir),
        "student": {"model": "simulated"},
        "teachers": {"t": {"model": "simulated", "replicas": 2, **engine}},
        "data": {"train": "none.jsonl"},
        "rollout": {"replicas": 2, "n": 1, "max_tokens": 64, **engine},
        "eval": {"every": 0},
        "cluster": {"device": "cpu"},
        "log": {"console": "off", "wandb": "off"},
    }
    return RunConfig.model_validate(smallest | sections)


if __name__ == "__main__":
    student = Factory(
        FACTORIES.student.path, (RolloutPlan(step_s=1e-3), 16, Lengths(4, 0.3, 8), 0.01)
    )
    trainer = Factory("tests.cluster.simulated:build_trainer", FACTORIES.trainer.extra)
    made = Factories(student, FACTORIES.teacher, trainer)
    run_module.launch = partial(launch, factories=made)  # type: ignore[assignment]
    sys.exit(main(sys.argv[1:]))
