"""Reads the load of a vLLM engine after each of its steps; names its processes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.engine.utils import CoreEngineProcManager
from vllm.v1.metrics.loggers import PrometheusStatLogger

from rollouter.slots import EngineLoad


def sentinels(engine: AsyncLLM) -> list[int]:
    """Sentinels of the engine's core processes; none where vLLM did not start them itself."""
    manager = engine.engine_core.resources.engine_manager
    return list(manager.sentinels()) if isinstance(manager, CoreEngineProcManager) else []


def load_watcher(
    observe: Callable[[EngineLoad], None], computed: Callable[[int], None]
) -> type[Any]:
    """A stat logger class for ``AsyncLLM`` that calls ``observe`` after every engine step.

    It calls ``computed`` with the number of prompt and response tokens of the step. As a subclass
    of vLLM's Prometheus logger it replaces that logger, whose metrics no part of a run reads.
    """

    class LoadWatcher(PrometheusStatLogger):
        def __init__(self, vllm_config: Any, engine_indexes: list[int] | None = None) -> None:
            self.engine_indexes = engine_indexes or [0]

        def record(
            self,
            scheduler_stats: Any,
            iteration_stats: Any,
            mm_cache_stats: Any = None,
            engine_idx: int = 0,
        ) -> None:
            if iteration_stats is not None:
                computed(iteration_stats.num_generation_tokens + iteration_stats.num_prompt_tokens)
            if scheduler_stats is not None:
                load = EngineLoad(
                    running=scheduler_stats.num_running_reqs,
                    waiting=scheduler_stats.num_waiting_reqs,
                    preempted=getattr(iteration_stats, "num_preempted_reqs", 0),
                    kv_cache=scheduler_stats.kv_cache_usage,
                )
                observe(load)

        def ignore(self, *_: object, **__: object) -> None:
            """Prints and records nothing."""

        log = log_engine_initialized = record_sleep_state = record_admission_rejection = ignore

    return LoadWatcher
