"""The sections ``student`` and ``rollout``: the model that is trained, and how it is sampled."""

from __future__ import annotations

from typing import Literal, Self

from pydantic import Field, model_validator

from async_opd.config.sections.elastic import Pooled, Replicas
from async_opd.config.sections.engine import EngineConfig
from async_opd.config.sections.section import Count, ModelSection, Rendering, Section


class StudentConfig(ModelSection, Rendering):
    """The model that is trained, and how its prompts are rendered."""


class RolloutConfig(Pooled, Section):
    """Sampling of the student's responses."""

    replicas: Replicas = 1
    """Independent engines of the student. ``{min: 2, max: 8}``: a run starts with at least 2, and
    has up to 8 where the cluster that it joins has GPUs for them (docs/cluster.md)."""
    tensor_parallel: Count = 1
    """GPUs of each engine."""
    n: Count = 4
    """Rollouts of each prompt (its group)."""
    max_tokens: Count = 1024
    """Longest response in tokens; longer ones are cut off (``finish_reason: length``)."""
    temperature: float = Field(default=1.0, gt=0, le=2)
    """Sampling temperature; rollouts' log-probabilities are those of the tempered distribution."""
    top_p: float = Field(default=1.0, gt=0, le=1)
    """Nucleus of the sampled distribution; 1 samples from all tokens."""
    top_k: int = Field(default=0, ge=0)
    """Number of the most probable tokens that are sampled from; 0: all."""
    min_p: float = Field(default=0.0, ge=0, le=1)
    """Samples from tokens at least this fraction as probable as the best one; 0: from all."""
    reproducible: bool = False
    """Samples every rollout with its own seed, from ``seed`` and its uid, so that it does not
    depend on other requests. Sampling is slower; docs/reliability.md has the further conditions."""
    concurrency: Count | Literal["auto"] = "auto"
    """Rollouts in flight on each replica. ``auto`` follows the load of its engine (waiting
    requests, preemptions, KV cache). In both cases at most a sixteenth (and at least one) more
    than ``engine.max_num_seqs``."""
    turn_cache: Literal["version", "episode"] = "version"
    """Keys and values that the later turns of an episode read: computed again under each new weight
    version (``version``), or those from before a sync too (``episode``), which saves the prefill of
    the whole context, as one long request would; importance weights then correct for more."""
    placement: Literal["dedicated", "colocated"] = "dedicated"
    """``dedicated``: on separate GPUs. ``colocated``: on the trainer's GPUs, alternating with
    it: when a batch is scored the engines finish their responses and sleep, the trainer takes its
    steps, its weights and optimizer move to host memory, and the engines wake (docs/cluster.md)."""
    with_: Literal["train"] | None = Field(default=None, alias="with")
    """The pool whose GPUs colocated engines share: each those of as many ranks as it has GPUs."""
    engine: EngineConfig = EngineConfig()
    """Settings of each engine."""

    @property
    def host(self) -> Literal["train"] | None:
        """The pool whose GPUs the engines share, if they are colocated."""
        return self.with_ if self.placement == "colocated" else None

    @model_validator(mode="after")
    def _colocated_has_a_pool(self) -> Self:
        if (self.placement == "colocated") != (self.with_ is not None):
            raise ValueError("'placement: colocated' and 'with: train' together")
        return self
