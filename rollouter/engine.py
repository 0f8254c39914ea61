"""vLLM's engine of the student: how it starts and takes new weights, its inputs and outputs.

    trainer ──join, receive, finish──► StudentEngine ──lists of a final output──► rollout's arrays

``load_watcher`` reads the load of a vLLM engine after each of its steps. Held rows are scored by
vLLM's prompt log-probabilities, in separate seats.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from vllm import AsyncEngineArgs, SamplingParams
from vllm.config import VllmConfig
from vllm.config.weight_transfer import WeightTransferConfig
from vllm.lora.request import LoRARequest
from vllm.platforms import current_platform
from vllm.v1.engine import utils
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.engine.utils import CoreEngineProcManager
from vllm.v1.metrics.loggers import PrometheusStatLogger

from async_opd.core.errors import (
    RolloutFault,
    StageError,
    TransferAborted,
    WeightSyncError,
    WorkersFailed,
)
from async_opd.core.samples import Prompt, Rollout, VersionSpan
from async_opd.core.sequence import Float32
from async_opd.core.uid import Uid
from async_opd.media.cache import MediaCache
from async_opd.media.engine_prompts import EnginePrompts
from async_opd.models.engine_args import fitted, smallest_gpu
from async_opd.models.processor import prompts_of
from async_opd.processes.engine_workers import ExitWatch, on_workers
from async_opd.processes.forked_engine import forked_engine
from async_opd.waiting.deadline import gather_or_cancel
from async_opd.weight_sync.freshness import refuse_other_digests
from async_opd.weight_sync.layout import MOST_ROWS, HeldRow, Rendezvous, WeightMeta
from rollouter.freshness_worker import ADAPTER_ID, EXTENSION
from rollouter.slots import EngineLoad
from rollouter.spec import StudentEngineSpec
from rollouter.transports import transport
from rollouter.transports.chunks import BACKEND, chunk_info
from rollouter.transports.engine import WEIGHTS_MIXED, WEIGHTS_UNCHANGED, register

if TYPE_CHECKING:
    from vllm.outputs import CompletionOutput


class StudentEngine:
    """A vLLM engine with the student's weights of one version."""

    def __init__(
        self, spec: StudentEngineSpec, media: MediaCache | None, watcher: type[Any]
    ) -> None:
        """``watcher``: see ``load_watcher``."""
        register()
        self._transport = transport(spec.transfer_backend)
        reported = current_platform.get_device_total_memory
        args = AsyncEngineArgs(
            **fitted(with_seats(spec.kwargs), spec.beside, lambda: smallest_gpu() or reported()),
            worker_extension_cls=EXTENSION,
            weight_transfer_config=WeightTransferConfig(backend=BACKEND),
            logprobs_mode="processed_logprobs",
            max_logprobs=spec.top_k + 1,
        )
        self._spec = spec
        self._adapter = ADAPTER if spec.kwargs.get("enable_lora") else None
        with forked_engine(utils, current_platform.is_cpu()):
            self._engine = AsyncLLM.from_engine_args(args, stat_loggers=[watcher])
        self._prompts, self._never = prompts_of(self._engine, "student", media)
        self._exit_watch = ExitWatch(spec.name, sentinels(self._engine))
        self._version = self._syncs = 0
        self._mixed = ""  # why it has weights of two versions, if it does

    async def ready(self) -> int:
        """Waits until the engine answers, then names the weights version 0. Returns its workers."""
        await self._engine.check_health()
        await self._engine.update_weight_version("0")
        await self._rpc("refuse_broken_sleep")
        await self._load_adapter()
        return int(self._engine.vllm_config.parallel_config.world_size)

    async def join(self, rendezvous: Rendezvous, rank_offset: int) -> None:
        """Joins the transfer group with this engine's workers at ``rank_offset``."""
        ranks = {"rank_offset": rank_offset, "world_size": rendezvous.world_size}
        info = ranks | chunk_info(self._transport.__name__, rendezvous)
        await self._rpc("init_weight_transfer_engine", info)

    async def receive(self, meta: WeightMeta) -> None:
        """Receives the new weights while the trainer sends them.

        TransferAborted if the transfer broke off. The engine still has all of its old weights then,
        or it generates no more until another transfer was complete.
        WrongWeights if its loader was given other tensors than the trainer sent.
        """
        if meta.digests:
            await self._rpc("record_received", self._spec.keeps_weights)
        await self._rpc("start_weight_update")
        update = {
            "names": list(meta.names),
            "dtype_names": list(meta.dtype_names),
            "shapes": [list(shape) for shape in meta.shapes],
        }
        try:
            await self._rpc("update_weights", update)
        except WorkersFailed as error:
            faults = [fault for fault in error.faults if fault]
            if not all(WEIGHTS_UNCHANGED in fault or WEIGHTS_MIXED in fault for fault in faults):
                raise
            if not all(WEIGHTS_UNCHANGED in fault for fault in error.faults):
                self._mixed = error.cause
                await self._rpc("end_update")
            raise TransferAborted(self._spec.name, error.cause) from error
        if meta.digests:
            refuse_other_digests(self._spec.name, meta, await self._rpc("received_digests"))

    async def write_weights(self, directory: str, sent: dict[str, str]) -> list[str]:
        """Writes the newest weights as a model's, if they have these digests by name.

        The names of those that have others. See ``write_kept``.
        """
        first, *_ = await self._rpc("write_kept", directory, sent)
        return list(first)

    async def finish(self, version: int) -> None:
        """Sets the version of the new weights. WeightSyncError if the engine reports another."""
        await self._rpc("finish_weight_update")
        await self._exit_watch.within(self._engine.update_weight_version(str(version)))
        await self._load_adapter()
        found = await self._exit_watch.within(self._engine.get_weight_version())
        if found != str(version):
            raise WeightSyncError(self._spec.name, f"after the sync to {version} it has {found}")
        self._version, self._mixed = version, ""
        self._syncs += 1

    async def _load_adapter(self) -> None:
        if self._adapter is not None:
            await self._rpc("load_adapter")

    async def _rpc(self, method: str, *args: Any) -> list[Any]:
        """Calls a method of vLLM's worker, or of FreshnessWorker, in every worker."""
        return await self._exit_watch.within(
            on_workers(self._engine, self._spec.name, method, *args)
        )


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


QUANTIZED_ROUNDING = 2.0**-4
"""Largest relative error of one rounding to a number of 3 bits after the point, such as float8."""

TF32_ROUNDING = 2.0**-11
"""The same of TF32: vLLM's attention on GPUs in float32 is Triton's (``TRITON_ATTN``), whose
``tl.dot`` rounds its operands to TF32 by default."""
ADAPTER = LoRARequest("student", ADAPTER_ID, "sent by the trainer")
"""The adapter that every request to an engine with an adapter names. vLLM never reads the path: the
adapter is always loaded."""


def with_seats(kwargs: dict[str, Any]) -> dict[str, Any]:
    """The engine arguments with room for the rows above ``max_num_seqs``: they wait little.

    Rollouts that wait in the engine (a sixteenth of ``max_num_seqs``, see ``rollouter.slots``) come
    first, and take these seats, too. So at most that many responses end before the rows begin.
    An engine with one seat gets no more: there a response is never computed in another batch than
    alone, and rows wait for its end.
    """
    seats = int(kwargs["max_num_seqs"])
    most = int(kwargs.get("max_num_batched_tokens") or seats + MOST_ROWS)
    return kwargs if seats == 1 else kwargs | {"max_num_seqs": min(seats + MOST_ROWS, most)}


def rounding_of(config: VllmConfig) -> float:
    """Largest relative error of one rounding in the engine."""
    if config.quant_config is not None:
        return QUANTIZED_ROUNDING
    if current_platform.is_cuda() and config.model_config.dtype == torch.float32:
        return TF32_ROUNDING
    return torch.finfo(config.model_config.dtype).eps / 2


async def held_logprobs(
    engine: AsyncLLM,
    rows: Sequence[HeldRow],
    number: int,
    prompts: EnginePrompts,
    adapter: LoRARequest | None = None,
) -> tuple[Float32, ...]:
    """Log-probabilities of each row's compared tokens, at temperature 1.

    ``number`` is unique; ``prompts`` are the engine's. StageError if the engine ends a request
    without them.
    """
    images = {sha256: encoded for row in rows for sha256, encoded in row.images.items()}
    seen = prompts.of_images(images)
    scoring = (
        _scored(engine, row, f"held#{number}/{index}", seen, adapter)
        for index, row in enumerate(rows)
    )
    return tuple(await gather_or_cancel(*scoring))


async def _scored(
    engine: AsyncLLM, row: HeldRow, name: str, prompts: EnginePrompts, adapter: LoRARequest | None
) -> Float32:
    """Of one row; vLLM reads no cached prefix with ``prompt_logprobs``, the salt makes sure."""
    params = SamplingParams(max_tokens=1, prompt_logprobs=0, detokenize=False)
    rollout = row.rollout()
    shown = await prompts.of(rollout.prompt)
    ids: list[int] = rollout.continuation.tolist()
    request: Any = shown.request(name, ids)
    async for output in engine.generate(request, params, name, lora_request=adapter):
        if output.finished and output.prompt_logprobs is not None:
            found = zip(output.prompt_logprobs[-len(ids) :], ids, strict=True)
            return np.array([row[token].logprob for row, token in found if row], np.float32)
    raise StageError("student", f"the engine ended the held row {name} without its scores")
