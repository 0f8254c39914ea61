"""The names of a run's actors in ``ray list actors`` and in the dashboard of its cluster.

    <run>/queue                                 MessageQueue
    <run>/rollouter                             Rollouter
    <run>/rollouter/replica/0 …                 StudentReplica
    <run>/rollouter/evaluation/0 …              StudentReplica, one that only evaluates
    <run>/teacher_scorer                        TeacherScorer
    <run>/teacher_scorer/<teacher>/replica/0 …  TeacherReplica
    <run>/trainer/0 …                           Trainer, one for each rank
    <run>/payloads/<node>/<number>              PayloadStore, one for each node with teachers

Each run has a separate namespace: two runs of one name on a cluster do not clash.
"""

from __future__ import annotations

import secrets
from dataclasses import dataclass
from pathlib import Path

from async_opd.config.run_config import RunConfig
from async_opd.core.stages import TRAINER
from async_opd.memory.pools import EVAL


@dataclass(frozen=True)
class ActorName:
    """Messages use ``name``; Ray shows ``<run>/<path>``, and ``kind`` as its class."""

    name: str
    path: str
    kind: str


QUEUE = ActorName("queue", "queue", "MessageQueue")
ROLLOUTER = ActorName("rollouter", "rollouter", "Rollouter")
SCORER = ActorName("scorer", "teacher_scorer", "TeacherScorer")


def student(index: int) -> ActorName:
    """A replica of the student."""
    return ActorName(f"student/{index}", f"{ROLLOUTER.path}/replica/{index}", "StudentReplica")


def evaluator(index: int) -> ActorName:
    """A replica of the student that only evaluates."""
    return ActorName(f"eval/{index}", f"{ROLLOUTER.path}/evaluation/{index}", "StudentReplica")


def teacher(teacher: str, index: int) -> ActorName:
    """A replica of a teacher."""
    path = f"{SCORER.path}/{teacher}/replica/{index}"
    return ActorName(f"teacher {teacher}/{index}", path, "TeacherReplica")


def trainer(rank: int) -> ActorName:
    """A rank of the trainer."""
    return ActorName(f"{TRAINER}/{rank}" if rank else TRAINER, f"trainer/{rank}", "Trainer")


def in_pool(pool: str, index: int) -> ActorName:
    """Process ``index`` of a pool."""
    made = {"rollout": student, EVAL: evaluator, "train": trainer}.get(pool)
    return made(index) if made else teacher(pool.removeprefix("teachers."), index)


def pool_of_student(config: RunConfig, index: int) -> tuple[str, int]:
    """The pool of one of the student's replicas, and its index there.

    Those that only evaluate have the indices after those of the rollout replicas.
    """
    rollouts = config.rollout.max_replicas
    return ("rollout", index) if index < rollouts else (EVAL, index - rollouts)


def run_name(config: RunConfig) -> str:
    """The name of the run's directory, or ``config.name`` without one."""
    return Path(config.run_dir or "").name or config.name


def namespace(config: RunConfig) -> str:
    """A new namespace for the actors of one run; every call returns another."""
    return f"{run_name(config)}-{secrets.token_hex(4)}"
