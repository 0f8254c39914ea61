"""Bytes and calls of a sample on each arrow, and the process that reaches its limit first.

    driver ─► queue ─► student ─► queue ─► scorer ─► teacher ─► scorer ─► queue ─► ranks
     prompts               rollouts            rollouts        samples        samples

A sample by reference (``queue.payloads``) goes on as its rollout, and its scores from the
teacher's node to the ranks.

Replicas and ranks share the load of their pool. Driver, queue and scorer are one process each: what
their work costs was measured (``COSTS``), and a process is at its limit when it takes one core.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from async_opd.config.run_config import RunConfig
from async_opd.config.sections.teachers import EndpointTeacher
from async_opd.core.batch import MESSAGE_BYTES
from async_opd.models.engine_args import Device
from async_opd.models.hub import with_cached
from async_opd.models.model_files import ModelError
from async_opd.queue.sizes import ITEM_BYTES, NUMBER, payloads, stored_from
from async_opd.tools.plan.setting import Setting


@dataclass(frozen=True)
class Cost:
    """CPU milliseconds of a process: of each sample, and of each MiB in or out."""

    sample_ms: float
    mib_ms: float


COSTS: Mapping[str, Cost] = {
    "driver": Cost(0.13, 0.0),
    "queue": Cost(2.4, 0.27),
    "scorer": Cost(2.1, 0.77),
}
"""Of a sample as measured by ``python -m benchmarks.scale`` with 256 replicas, where calls carry
few samples; of a MiB, what samples of 80 MiB took beyond that (``--payload 80``)."""


@dataclass(frozen=True)
class Arrow:
    """Bytes of one sample from one process to another; ``calls``: its share of the calls."""

    source: str
    target: str
    content: str
    nbytes: float
    calls: float


@dataclass(frozen=True)
class Load:
    """The mean sample of a run, or of one teacher's part of it.

    Tokens of its prompt and response, bytes of each response token as rollout and as sample,
    rollouts of a prompt, of a batch of the teacher, of a batch of the trainer, and its ranks.
    """

    prompt_tokens: float
    response_tokens: float
    rollout_bytes: float
    sample_bytes: float
    n: int
    scored: int
    batch: int
    ranks: int
    stored_from: float | None = None
    """Bytes from which on a sample goes by reference; None: never."""

    def arrows(self) -> list[Arrow]:
        """All arrows, in the order of a sample's life; each sample passes each of them once."""
        prompt = ITEM_BYTES + NUMBER * self.prompt_tokens
        rollout = prompt + self.rollout_bytes * self.response_tokens
        sample = prompt + self.sample_bytes * self.response_tokens
        scores = 0.0
        if self.stored_from is not None and sample >= self.stored_from:
            sample, scores = rollout, sample - rollout
        in_a_call = min(self.scored, max(MESSAGE_BYTES / (sample + scores), 1.0))
        per_rank = min(self.batch / self.ranks, max(MESSAGE_BYTES / sample, 1.0))
        return [
            Arrow("driver", "queue", "prompt", prompt / self.n, 1 / self.n),
            Arrow("queue", "student", "prompt", prompt / self.n, 1 / self.n),
            Arrow("student", "queue", "rollout", rollout, 1.0),
            Arrow("queue", "scorer", "rollout", rollout, 1 / self.scored),
            Arrow("scorer", "teacher", "rollout", rollout, 1 / in_a_call),
            Arrow("teacher", "scorer", "sample", sample, 1 / in_a_call),
            Arrow("scorer", "queue", "sample", sample, 1 / in_a_call),
            Arrow("queue", "ranks", "sample", sample, 1 / per_rank),
            Arrow("teacher", "ranks", "scores", scores, 1.0 if scores else 0.0),
        ]


def arrows_of(config: RunConfig, setting: Setting) -> list[Arrow]:
    """The arrows of the mean sample of a run; none if its models' files cannot be read here."""
    device: Device = "cpu" if config.cluster.device == "cpu" else "cuda"
    stored = None
    try:
        cached = with_cached(config, [])[0]
        found = {one.teacher: one for one in payloads(cached, device)}
        stored = stored_from(cached, device)
    except ModelError:
        found = {}
    if found.keys() != config.teachers.keys():
        return []
    tokens = setting.prompt_tokens, setting.response_tokens
    columns = zip(
        *(
            Load(
                *tokens,
                found[teacher.name].rollout,
                found[teacher.name].sample,
                setting.rollout.n,
                teacher.batch,
                setting.batch_size,
                setting.ranks,
                None if isinstance(config.teachers[teacher.name], EndpointTeacher) else stored,
            ).arrows()
            for teacher in setting.teachers
        ),
        strict=True,
    )
    shares = [teacher.share for teacher in setting.teachers]
    return [
        replace(
            column[0],
            nbytes=sum(s * arrow.nbytes for s, arrow in zip(shares, column, strict=True)),
            calls=sum(s * arrow.calls for s, arrow in zip(shares, column, strict=True)),
        )
        for column in columns
    ]


def limits(arrows: Sequence[Arrow]) -> dict[str, float]:
    """Samples/s at which each single process takes one core, the lowest first."""
    found = {}
    for name, cost in COSTS.items():
        nbytes = sum(arrow.nbytes for arrow in arrows if name in (arrow.source, arrow.target))
        found[name] = 1000 / (cost.sample_ms + cost.mib_ms * nbytes / (1 << 20))
    return dict(sorted(found.items(), key=lambda item: item[1]))
