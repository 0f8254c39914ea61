"""What a vLLM engine tells after each of its steps, as ``EngineLoad``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from vllm.v1.metrics.loggers import PrometheusStatLogger

from rollouter.slots import EngineLoad


def load_watcher(
    observe: Callable[[EngineLoad], None], computed: Callable[[int], None]
) -> type[Any]:
    """A stat logger class for ``AsyncLLM`` that calls ``observe`` after every engine step.

    ``computed`` gets the tokens of each, of prompts and responses.

    It takes the place of vLLM's Prometheus logger, which nobody reads here.
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
                preempted = getattr(iteration_stats, "num_preempted_reqs", 0)
                observe(
                    EngineLoad(
                        running=scheduler_stats.num_running_reqs,
                        waiting=scheduler_stats.num_waiting_reqs,
                        preempted=preempted,
                        kv_cache=scheduler_stats.kv_cache_usage,
                    )
                )

        def log(self) -> None:
            """Nothing to print."""

        def log_engine_initialized(self) -> None:
            """Nothing to print."""

        def record_sleep_state(self, sleep: int = 0, level: int = 0) -> None:
            """Nothing to record."""

        def record_admission_rejection(self, reason: str) -> None:
            """Nothing to record: the engine's queue is not bounded."""

    return LoadWatcher
