"""The ``async`` and ``sync`` sections: staleness, and weight syncs with their transport."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Annotated, Any, Literal, Self

from pydantic import Field, PlainSerializer, WrapValidator, model_validator

from async_opd.config.precision import FakeQuantization
from async_opd.config.registry import TRANSPORTS
from async_opd.config.sections.section import Count, Section
from async_opd.config.user_code import TRANSPORT_GROUP, names_user_code


def _or_of_user(value: Any, known: Callable[[Any], Any]) -> Any:
    """A transport of a user's package as it is, without an import of it."""
    if isinstance(value, str) and names_user_code(value, TRANSPORT_GROUP):
        return value
    return known(value)


if TYPE_CHECKING:
    Backend = str
else:
    Backend = Annotated[
        Literal["auto", *TRANSPORTS], WrapValidator(_or_of_user), PlainSerializer(str)
    ]


class AsyncConfig(Section):
    """Bounds of staleness: admitted ≤ (version + 1 + s) · K · batch."""

    staleness_threshold: float = Field(default=0.5, ge=0)
    """s: share of a weight version's samples that may start before the engines have its weights. 0
    with ``sync_steps`` 1 is exactly on-policy."""
    sync_steps: Count = 4
    """K: optimizer steps between two weight syncs."""
    on_sync: Literal["keep", "recompute", "finish"] = "keep"
    """Rollouts in flight at a sync are frozen and continued on their KV cache (``keep``), continued
    after a new prefill (``recompute``), or finished on the old weights first (``finish``)."""
    max_version_lag: int | None = Field(default=None, ge=0)
    """Hard bound of a sample's staleness when it is trained, counted from its oldest token. By
    default none: admission bounds the number of stale samples, not the staleness of one."""
    on_stale: Literal["requeue", "mask", "train"] = "requeue"
    """A sample beyond ``max_version_lag`` is sampled again (``requeue``); or it is trained, without
    its tokens beyond the bound in the distillation loss (``mask``), or as it is and counted
    (``train``). A reward's loss trains whole responses."""

    @model_validator(mode="after")
    def _a_mask_has_a_bound(self) -> Self:
        if self.on_stale == "mask" and self.max_version_lag is None:
            raise ValueError("'on_stale' mask needs 'max_version_lag', the bound of a token's age")
        return self

    def lag_to(self, act: Literal["requeue", "mask"]) -> int | None:
        """The bound beyond which samples are sampled again, or tokens masked; None: none are."""
        return self.max_version_lag if self.on_stale == act else None


class SyncConfig(Section):
    """Weight syncs from the trainer to the rollout engines."""

    backend: Backend = "auto"
    """How weights travel; ``auto`` is nccl on GPUs and gloo on CPUs. Where rollout engines have the
    trainer's GPUs it is shared_memory, and in a cluster that is joined gloo. Also a module of a
    package of yours (``package.module:``), or an entry point of the group
    ``async_opd.transports``."""
    chunk_mib: Count = 256
    """Size of the messages that weights are packed into, in MiB."""
    rolling: bool = False
    """Updates the rollout replicas one after the other, so that generation never stops altogether;
    a sync takes longer, and meanwhile replicas have different versions."""
    timeout_s: float = Field(default=120, gt=0)
    """Bound of the rendezvous and of each part of a sync; to that of the broadcast the time of the
    weights' bytes is added. The pause of ``on_sync: finish`` lasts as long as the longest response:
    for it, this is the longest time without a token."""
    min_mib_per_s: float = Field(default=128, gt=0)
    """Lowest assumed speed at which the weights reach all engines and are loaded."""
    verify_every: int = Field(default=10, ge=0)
    """Syncs between two proofs that every rollout replica has the trainer's weights: both score a
    few held rows, and digests of the engines' parameters are compared. The first sync is always
    proven, and so is the next one after a replica that joined between two snapshots. Digests of
    what was received are compared at every sync, and the second sync is proven where an engine
    keeps parameters in another form than they are sent. 0 switches all of it off."""
    fake_quantization: FakeQuantization | None = None
    """Rounds the matrices that are sent as a scheme of low precision would, and sends them in the
    engines' dtype: a run then has the error of these weights on any device, and the speed and
    memory of whole ones. Embedding, head, norms and routers stay as they are."""
    on_wrong_weights: Literal["rebuild", "stop"] = "rebuild"
    """A replica without the trainer's weights is rebuilt, or ends the run."""

    @property
    def seconds_per_byte(self) -> float:
        """Seconds added to ``timeout_s`` for each byte of a broadcast."""
        return 1 / (self.min_mib_per_s * (1 << 20))
