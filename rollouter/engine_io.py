"""The engine's inputs and outputs: lists of a final output become a rollout's arrays.

``load_watcher`` reads the load of a vLLM engine after each of its steps.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.engine.utils import CoreEngineProcManager
from vllm.v1.metrics.loggers import PrometheusStatLogger

from async_opd.core.errors import RolloutFault
from async_opd.core.samples import Prompt, Rollout, VersionSpan
from async_opd.core.uid import Uid
from rollouter.slots import EngineLoad

if TYPE_CHECKING:
    from vllm.outputs import CompletionOutput


def refuse_foreign_tokens(prompt: Prompt, uid: Uid, rows: int) -> None:
    """RolloutFault for a token that is none of the model's ``rows``.

    An engine without a tokenizer does not check tokens, and dies of such a one.
    """
    ids = prompt.token_ids
    if len(ids) and not 0 <= int(ids.min()) <= int(ids.max()) < rows:
        found = f"its tokens are from {ids.min()} to {ids.max()}"
        cause = f"the engine refuses {uid}: {found}, the model has {rows}"
        raise RolloutFault("student", cause)


def rollout_of(uid: Uid, prompt: Prompt, output: CompletionOutput, top_k: int) -> Rollout:
    """The rollout of a finished request for ``top_k`` log-probabilities in flat lists.

    At each position the engine lists the sampled token first, then its ``top_k`` best tokens, which
    may include the sampled one. It returns experts if it was started to (``train.routing``).
    """
    ids = np.asarray(output.token_ids, dtype=np.int32)
    flat: Any = output.logprobs
    shape = (len(ids), 1 + top_k)
    logprobs = np.asarray(flat.logprobs, dtype=np.float32).reshape(shape)
    listed = np.asarray(flat.token_ids, dtype=np.int32).reshape(shape)
    spans = output.weight_versions or ()
    rollout = Rollout.plain(
        uid=uid,
        prompt=prompt,
        response_ids=ids,
        rollout_logprobs=np.ascontiguousarray(logprobs[:, 0]),
        version_spans=tuple(VersionSpan(int(s.version), s.start, s.end) for s in spans),
        finish_reason="stop" if output.finish_reason == "stop" else "length",
        topk_ids=np.ascontiguousarray(listed[:, 1:]) if top_k else None,
    )
    return replace(rollout, routed_experts=output.routed_experts)


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
