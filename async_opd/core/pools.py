"""What a run takes of the machine."""

from __future__ import annotations

from dataclasses import dataclass

from async_opd.core.config import RunConfig


@dataclass(frozen=True)
class Pool:
    """What one role takes: ``replicas`` engines (or one trainer), each on GPUs of its own."""

    name: str
    replicas: int
    gpus_per_replica: int
    model: str
    what: str

    @property
    def gpus(self) -> int:
        """GPUs of the whole pool."""
        return self.replicas * self.gpus_per_replica


def pools(config: RunConfig) -> list[Pool]:
    """The pools of a run, as they would be on GPUs."""
    rollout, student = config.rollout, config.student.model
    return [
        Pool("rollout", rollout.replicas, rollout.tensor_parallel, student, "student answers"),
        *(
            Pool(
                f"teachers.{name}", t.replicas, t.gpus, config.teacher_model(name), "scores answers"
            )
            for name, t in config.teachers.items()
        ),
        Pool("train", 1, 1, student, "trains the student"),
    ]
