"""What a run takes of the machine."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from async_opd.config.run_config import RunConfig


@dataclass(frozen=True)
class Pool:
    """What one role takes: ``replicas`` engines (or ranks), each on GPUs of its own.

    Or on those of another pool, which ``shares`` names: then they are counted there.
    """

    name: str
    replicas: int
    gpus_per_replica: int
    model: str
    what: str
    shares: str | None = None

    @property
    def gpus(self) -> int:
        """GPUs of the whole pool."""
        return 0 if self.shares else self.replicas * self.gpus_per_replica

    @property
    def words(self) -> str:
        """Its GPUs as a term of a sum."""
        own = f"{self.name} {self.replicas}·{self.gpus_per_replica}"
        return f"{self.name} 0 (on {self.shares}'s)" if self.shares else own


def pools(config: RunConfig) -> list[Pool]:
    """The pools of a run, as they would be on GPUs."""
    rollout, student = config.rollout, config.student.model
    return [
        Pool("rollout", rollout.replicas, rollout.tensor_parallel, student, "student answers"),
        *(
            Pool(
                f"teachers.{name}",
                t.replicas,
                t.gpus,
                config.teacher_model(name),
                "scores answers",
                t.host,
            )
            for name, t in config.teachers.items()
        ),
        Pool("train", config.train.ranks, 1, student, "trains the student"),
    ]


def misplaced(config: RunConfig) -> Iterator[tuple[str, str, str]]:
    """Colocated teachers that do not fit their hosts: (key, what is wrong, remedy)."""
    hosts = {pool.name: pool for pool in pools(config) if pool.name in ("rollout", "train")}
    for name, teacher in config.teachers.items():
        if teacher.host is None:
            continue
        host = hosts[teacher.host]
        if teacher.replicas > host.replicas:
            fault = f"{teacher.replicas}, but {host.name} has {host.replicas} to share GPUs with"
            yield f"teachers.{name}.replicas", fault, f"at most {host.replicas}"
        if teacher.gpus != host.gpus_per_replica:
            fault = f"{teacher.gpus}, but it shares the {host.gpus_per_replica} of {host.name}"
            yield f"teachers.{name}.tensor_parallel", fault, f"{host.gpus_per_replica}"
