"""The specification of a teacher replica. Imports no vLLM, so that every process may import it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from async_opd.config.run_config import RunConfig
from async_opd.config.sections.loss import ScoreKind, score_kind, scored_top_k
from async_opd.config.sections.teachers import EngineTeacher, VllmTeacher
from async_opd.environments.episode import EpisodeSpec
from async_opd.models.engine_args import Device, engine_kwargs
from async_opd.models.model_files import is_vision_model


@dataclass(frozen=True)
class TeacherEngineSpec:
    """One replica. ``kwargs`` come from ``async_opd.models.engine_args``.

    ``kind`` is the kind of scores that it returns; ``top_k`` is 0 for kinds without one.
    ``temperature`` applies to its log-probabilities, not to hidden states. ``beside``: see
    ``async_opd.models.engine_args.fitted``. ``episodes``: how it plays those of an environment.
    """

    name: str
    kwargs: dict[str, Any]
    kind: ScoreKind
    top_k: int
    eos_ids: tuple[int, ...]
    temperature: float = 1.0
    beside: int | None = None
    episodes: EpisodeSpec | None = None

    @classmethod
    def of(
        cls,
        config: RunConfig,
        device: Device,
        eos_ids: tuple[int, ...],
        name: str,
        teacher: str,
        beside: int | None,
    ) -> TeacherEngineSpec:
        """Any replica of a run's teacher, on a device."""
        settings = config.teachers[teacher]
        assert isinstance(settings, EngineTeacher)
        section = settings if isinstance(settings, VllmTeacher) else config.student
        model = config.teacher_model(teacher)
        return cls(
            name=name,
            kwargs=engine_kwargs(
                settings.engine,
                model=model,
                device=device,
                tensor_parallel=settings.tensor_parallel,
                seed=config.seed,
                trust_remote_code=section.trust_remote_code,
                images=config.data.max_images if is_vision_model(model) else 0,
                processor_kwargs=section.processor_kwargs,
                sleeps=settings.host is not None,
            ),
            kind=score_kind(config.loss),
            top_k=scored_top_k(config.loss),
            eos_ids=eos_ids,
            temperature=settings.temperature,
            beside=beside,
            episodes=None if config.environment is None else EpisodeSpec(config, teacher),
        )
