"""A small run whose engines and learner only take time; its actors are real."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from async_opd.cluster.actor_factory import Factories, Factory
from async_opd.config.run_config import RunConfig
from async_opd.config.sections.plan import RolloutPlan, TeacherPlan, TrainPlan
from async_opd.plan.measure.lengths import Lengths

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


def config(run_dir: Path, **sections: Any) -> RunConfig:
    """Two replicas of the student and two of the teacher ``t``."""
    return RunConfig.model_validate(
        {
            "name": "simulated",
            "run_dir": str(run_dir),
            "student": {"model": "simulated"},
            "teachers": {
                "t": {"model": "simulated", "replicas": 2, "engine": {"max_num_seqs": 16}}
            },
            "data": {"train": "none.jsonl"},
            "rollout": {
                "replicas": 2,
                "n": 1,
                "max_tokens": 64,
                "engine": {"max_num_seqs": 16},
            },
            "eval": {"every": 0},
            "cluster": {"device": "cpu"},
            "log": {"console": "off", "wandb": "off"},
            **sections,
        }
    )
