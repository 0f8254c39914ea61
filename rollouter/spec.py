"""The specification of a student replica. Imports no vLLM, so that every process may import it."""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from hashlib import blake2b
from typing import Any, Literal

from async_opd.config.run_config import RunConfig
from async_opd.config.sections.environment import ENVIRONMENT
from async_opd.config.sections.loss import score_kind, scored_top_k
from async_opd.core.stages import SamplingSpec
from async_opd.core.uid import Uid
from async_opd.environments.episode import EpisodeSpec
from async_opd.grading.grader_pool import GraderSpec
from async_opd.models.adapted import adapter_kwargs
from async_opd.models.engine_args import Device, engine_kwargs
from async_opd.models.model_files import is_vision_model
from rollouter.transports import chosen


@dataclass(frozen=True)
class StudentEngineSpec:
    """One replica. ``kwargs`` come from ``async_opd.models.engine_args``.

    ``top_k`` is the number of its best tokens that it returns at each position, 0 if the
    objective needs none; ``grader`` gives the task reward, in runs with one. With a ``seed`` every
    rollout has a different seed, derived from it and the uid. ``incarnation`` counts the restarts.
    ``beside``: see ``async_opd.models.engine_args.fitted``. One that ``evaluates`` takes no prompts
    of the queue, and grades no rewards. ``episodes``: in runs with an environment.
    """

    name: str
    kwargs: dict[str, Any]
    sampling: SamplingSpec
    eos_ids: tuple[int, ...]
    transfer_backend: str  # a key of async_opd.config.registry.TRANSPORTS
    concurrency: int | Literal["auto"] = "auto"
    top_k: int = 0
    grader: GraderSpec | None = None
    seed: int | None = None
    incarnation: int = 0
    beside: int | None = None
    evaluates: bool = False
    episodes: EpisodeSpec | None = None
    turn_cache: Literal["version", "episode"] = "version"
    keeps_weights: bool = False
    """Whether it keeps a copy of the newest weights, from which a trainer can go on."""

    @classmethod
    def of(
        cls,
        config: RunConfig,
        device: Device,
        eos_ids: tuple[int, ...],
        name: str,
        index: int,
        incarnation: int,
        beside: int | None,
        evaluates: bool = False,
    ) -> StudentEngineSpec:
        """Replica ``index`` of a run's student, on a device."""
        rollout = config.rollout
        return cls(
            name=name,
            kwargs=engine_kwargs(
                rollout.engine,
                model=config.student.model,
                device=device,
                tensor_parallel=rollout.tensor_parallel,
                seed=config.seed + index,
                trust_remote_code=config.student.trust_remote_code,
                images=config.data.max_images if is_vision_model(config.student.model) else 0,
                processor_kwargs=config.student.processor_kwargs,
                sleeps=not evaluates
                and (
                    rollout.host is not None
                    or any(teacher.host == "rollout" for teacher in config.teachers.values())
                ),
            )
            | adapter_kwargs(config.train.lora, config.student.model)
            | ({"enable_return_routed_experts": True} if config.train.routing == "replay" else {}),
            sampling=SamplingSpec(
                rollout.max_tokens,
                rollout.temperature,
                rollout.top_p,
                rollout.n,
                rollout.top_k,
                rollout.min_p,
            ),
            eos_ids=eos_ids,
            transfer_backend=chosen(config.sync_backend, device),
            concurrency=rollout.concurrency,
            top_k=scored_top_k(config.loss) if score_kind(config.loss) == "student_topk" else 0,
            grader=None
            if evaluates or config.reward is None or config.reward.grader == ENVIRONMENT
            else GraderSpec.of(config, config.reward.grader),
            seed=config.seed if rollout.reproducible else None,
            incarnation=incarnation,
            beside=beside,
            evaluates=evaluates,
            episodes=None if config.environment is None else EpisodeSpec(config),
            turn_cache=rollout.turn_cache,
            keeps_weights=config.cluster.trainer_recovery == "replica" and not evaluates,
        )

    @property
    def consumer(self) -> str:
        """Its name in the queue, a new one for each incarnation: old leases are released."""
        return f"{self.name}#{self.incarnation}"

    def request(self, uid: Uid, sampling: SamplingSpec, top_k: int) -> dict[str, Any]:
        """The engine's sampling parameters of one rollout."""
        return {
            **asdict(replace(sampling, n=1)),
            "seed": self.seed_of(uid),
            "stop_token_ids": list(self.eos_ids),
            "logprobs": top_k,
            "flat_logprobs": True,
            "detokenize": False,
        }

    def seed_of(self, uid: Uid) -> int | None:
        """A rollout's seed, if any: 63 bits of BLAKE2b over the run's seed and the uid."""
        if self.seed is None:
            return None
        digest = blake2b(f"{self.seed}/{uid}".encode(), digest_size=8).digest()
        return int.from_bytes(digest, "little") >> 1
