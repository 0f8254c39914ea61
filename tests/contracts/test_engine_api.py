"""The methods, outputs and statistics of vLLM's engine that replicas use.

Engines on CPUs run most of it in other tests. Here it is held by name, so that another version of
vLLM is refused by the name of what changed in it, and with the arguments that GPUs get.
"""

from __future__ import annotations

import ast
import dataclasses
import inspect
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any, get_args

import pytest
import torch

from async_opd.config.sections.engine import EngineConfig
from async_opd.models.engine_args import engine_kwargs
from tests.contracts import ROOT, contract, users

pytestmark = pytest.mark.slow  # imports vllm

ENGINE = "vllm.v1.engine.async_llm.AsyncLLM"
STUDENT = "rollouter/engine.py"
LLM_HEAD = "vllm.model_executor.layers.vocab_parallel_embedding.ParallelLMHead"
RELOAD = "vllm.model_executor.model_loader.reload"
FACTORY = "vllm.distributed.weight_transfer.factory.WeightTransferEngineFactory"
TRANSFER = "vllm.distributed.weight_transfer"


def calls(file: str) -> Iterator[tuple[str, ast.Call]]:
    """The calls of methods of an engine and of AsyncLLM in one of our modules."""
    for node in ast.walk(ast.parse((ROOT / file).read_text())):
        if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)):
            continue
        if ast.unparse(node.func.value) in ("self._engine", "engine", "AsyncLLM"):
            yield node.func.attr, node


CALLS = {
    f"{file}:{call.lineno} {name}": (name, call)
    for file in sorted(users(ENGINE) | {"rollouter/replica.py"})  # a StudentEngine, too
    for name, call in calls(file)
}


@pytest.mark.parametrize("where", CALLS)
def test_the_engine_has_every_method_that_is_called_with_its_arguments(where: str) -> None:
    from vllm.v1.engine.async_llm import AsyncLLM

    name, call = CALLS[where]
    named = {keyword.arg: None for keyword in call.keywords if keyword.arg}
    with contract(f"{ENGINE}.{name}", f"takes {len(call.args)} arguments and {list(named)}"):
        method = getattr(AsyncLLM, name)
        own = [None] if "self" in inspect.signature(method).parameters else []
        inspect.signature(method).bind(*own, *call.args, **named)


def test_pauses_have_the_modes_that_we_ask_for() -> None:
    from vllm.v1.engine import PauseMode
    from vllm.v1.engine.async_llm import AsyncLLM

    from rollouter.replica import PAUSE

    for given in PAUSE.values():
        with contract(f"{ENGINE}.pause_generation", f"takes {given}"):
            inspect.signature(AsyncLLM.pause_generation).bind(None, **given)
            assert given["mode"] in get_args(PauseMode)


@pytest.mark.parametrize(("tensor_parallel", "images"), [(1, 0), (2, 0), (1, 3)])
def test_engines_on_gpus_are_made_of_arguments_that_exist(
    tensor_parallel: int, images: int
) -> None:
    from vllm import AsyncEngineArgs

    kwargs = engine_kwargs(
        EngineConfig(max_model_len=100),
        model="m",
        device="cuda",
        tensor_parallel=tensor_parallel,
        seed=0,
        trust_remote_code=False,
        sleeps=True,
        images=images,
        processor_kwargs={"max_pixels": 784},
    )
    own = {"worker_cls": "w", "weight_transfer_config": None, "max_logprobs": 3}
    more = {"logprobs_mode": "processed_logprobs", "gpu_memory_utilization": 0.5}
    with contract("vllm.engine.arg_utils.AsyncEngineArgs", "has these fields", by=STUDENT):
        made = AsyncEngineArgs(**kwargs, **own, **more)
        assert {name: getattr(made, name) for name in kwargs} == kwargs


def test_an_engines_config_has_the_sections_that_are_read() -> None:
    from vllm.config import VllmConfig

    read = {"model_config", "parallel_config", "cache_config", "quant_config"}
    with contract("vllm.config.VllmConfig", f"has {sorted(read)}"):
        assert read <= fields(VllmConfig)


def test_the_engines_processes_can_be_watched() -> None:
    from vllm.v1.engine.core_client import BackgroundResources
    from vllm.v1.engine.utils import CoreEngineProcManager

    with contract("vllm.v1.engine.utils.CoreEngineProcManager.sentinels", "gives sentinels"):
        source = inspect.getsource(CoreEngineProcManager.sentinels)
        assert "proc.sentinel for proc in self.processes" in source
    of = "vllm.v1.engine.core_client.BackgroundResources"
    with contract(of, "keeps the processes as engine_manager", by=STUDENT):
        assert "engine_manager" in BackgroundResources.__dataclass_fields__


def test_vllm_waits_for_its_processes_as_long_as_configured() -> None:
    from vllm.v1.engine import core_client

    of = "vllm.v1.engine.core_client.MPClient"
    with contract(of, "waits VLLM_ENGINE_READY_TIMEOUT_S", by="async_opd/models/engine_args.py"):
        assert "timeout=VLLM_ENGINE_READY_TIMEOUT_S * 1000" in inspect.getsource(core_client)
    from vllm.v1.executor import multiproc_executor

    of, waits = "vllm.v1.executor.multiproc_executor", "VLLM_EXECUTE_MODEL_TIMEOUT_SECONDS"
    with contract(of, f"waits {waits} for a step", by="async_opd/models/engine_args.py"):
        assert f"timeout=envs.{waits}" in inspect.getsource(multiproc_executor)


# ── requests and outputs ───────────────────────────────────────────────────────────────────────


def fields(of: Any) -> set[str]:
    return {field.name for field in dataclasses.fields(of)}


def test_a_prompt_has_tokens_and_a_salt() -> None:
    from vllm.inputs import TokensPrompt

    with contract("vllm.inputs.TokensPrompt", "has prompt_token_ids and cache_salt"):
        assert {"prompt_token_ids", "cache_salt"} <= TokensPrompt.__annotations__.keys()


def test_an_output_has_its_tokens_log_probabilities_and_versions() -> None:
    from vllm.outputs import CompletionOutput, RequestOutput
    from vllm.sampling_params import RequestOutputKind

    read = {"token_ids", "logprobs", "finish_reason", "weight_versions"}
    with contract("vllm.outputs.CompletionOutput", f"has {sorted(read)}"):
        assert read <= fields(CompletionOutput)
    read = {"finished", "outputs", "num_cached_tokens", "prompt_logprobs"}
    with contract("vllm.outputs.RequestOutput", f"has {sorted(read)}, prompt_token_id_logprobs"):
        read |= {"prompt_token_id_logprobs"}
        assert read <= inspect.signature(RequestOutput).parameters.keys()
    with contract("vllm.sampling_params.RequestOutputKind.FINAL_ONLY", "is one of its kinds"):
        assert RequestOutputKind.FINAL_ONLY


def test_a_request_that_is_refused_is_an_error_of_the_client() -> None:
    from vllm import exceptions

    with contract("vllm.exceptions.VLLMClientError", "is above errors of a request's values"):
        assert issubclass(exceptions.VLLMValidationError, exceptions.VLLMClientError)


# ── statistics ─────────────────────────────────────────────────────────────────────────────────


def test_an_engines_load_is_read_from_its_statistics() -> None:
    from vllm.v1.metrics.stats import IterationStats, SchedulerStats

    from rollouter.engine import load_watcher

    loads: list[Any] = []
    tokens: list[int] = []
    with contract("vllm.v1.metrics.loggers.PrometheusStatLogger", "can be replaced by ours"):
        from vllm.v1.metrics.loggers import PrometheusStatLogger, StatLoggerManager

        made = load_watcher(loads.append, tokens.append)(vllm_config=None, engine_indexes=[0])
        assert isinstance(made, PrometheusStatLogger)
        assert "if not custom_prometheus_logger:" in inspect.getsource(StatLoggerManager.__init__)
    with contract("vllm.v1.metrics.loggers.PrometheusStatLogger.record", "gets these statistics"):
        ours = inspect.signature(made.record).parameters.keys()
        assert ours >= inspect.signature(PrometheusStatLogger.record).parameters.keys() - {"self"}
        made.record(SchedulerStats(num_running_reqs=3, kv_cache_usage=0.5), IterationStats())
    assert (loads[0].running, loads[0].kv_cache, tokens) == (3, 0.5, [0])


# ── weights ────────────────────────────────────────────────────────────────────────────────────


def test_a_backend_can_be_registered_once(monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm.config.weight_transfer import WeightTransferConfig
    from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory

    from rollouter.transports.chunks import BACKEND
    from rollouter.transports.engine import ChunkEngine, register

    with contract(f"{FACTORY}._registry", "has the classes by name, as functions that give them"):
        monkeypatch.setattr(WeightTransferEngineFactory, "_registry", {})
        register()
        register()
        (made,) = WeightTransferEngineFactory._registry.values()
        assert made() is ChunkEngine
    with contract("vllm.config.weight_transfer.WeightTransferConfig", "takes any backend's name"):
        assert WeightTransferConfig(backend=BACKEND).backend == BACKEND


def test_a_backend_is_all_that_vllms_base_class_asks_for() -> None:
    from vllm.distributed.weight_transfer import base

    from rollouter.transports.engine import ChunkEngine, ChunkInitInfo, ChunkUpdateInfo

    with contract(f"{TRANSFER}.base.WeightTransferEngine", "has no further abstract methods"):
        assert ChunkEngine.__abstractmethods__ == frozenset()
    with contract(f"{TRANSFER}.base.WeightTransferInitInfo", "is a dataclass without fields"):
        assert fields(base.WeightTransferInitInfo) < fields(ChunkInitInfo)
    with contract(f"{TRANSFER}.base.WeightTransferUpdateInfo", "is a dataclass without fields"):
        assert fields(base.WeightTransferUpdateInfo) < fields(ChunkUpdateInfo)
    with contract(f"{TRANSFER}.base.WeightTransferInitRequest", "has the field init_info"):
        assert base.WeightTransferInitRequest(init_info={"a": 1}).init_info == {"a": 1}
    with contract(f"{TRANSFER}.base.WeightTransferUpdateRequest", "has the field update_info"):
        assert base.WeightTransferUpdateRequest(update_info={"a": 1}).update_info == {"a": 1}


def test_a_reload_leaves_every_weight_at_its_address() -> None:
    """CUDA graphs have the addresses of the weights."""
    from vllm.model_executor.model_loader.reload import (
        finalize_layerwise_reload,
        initialize_layerwise_reload,
        record_metadata_for_reloading,
    )
    from vllm.model_executor.model_loader.weight_utils import default_weight_loader

    model: Any = torch.nn.Sequential(torch.nn.Linear(3, 2))
    before = {name: weight.data_ptr() for name, weight in model.named_parameters()}
    record_metadata_for_reloading(model)
    with contract(f"{RELOAD}.initialize_layerwise_reload", "takes a model"):
        initialize_layerwise_reload(model)
        for weight in list(model.parameters()):
            load = getattr(weight, "weight_loader", default_weight_loader)
            load(weight, torch.full(tuple(weight.shape), 7.0))
    with contract(f"{RELOAD}.finalize_layerwise_reload", "copies into the tensors of before"):
        finalize_layerwise_reload(model, None)
        assert all(bool((weight == 7).all()) for weight in model.parameters())
        after = {name: weight.data_ptr() for name, weight in model.named_parameters()}
        assert after == before


def test_a_head_packs_its_weights_again_on_a_cpu_only() -> None:
    from vllm.model_executor.layers import vocab_parallel_embedding as heads

    with contract(LLM_HEAD, "has a quant_method that packs weights, on a CPU, after loading"):
        assert issubclass(heads.ParallelLMHead, heads.VocabParallelEmbedding)
        assert "self.quant_method" in inspect.getsource(heads.VocabParallelEmbedding.__init__)
        source = inspect.getsource(heads.UnquantizedEmbeddingMethod.process_weights_after_loading)
        assert "if current_platform.is_cpu():" in source


def test_a_group_has_an_id_of_128_bytes() -> None:
    from vllm.distributed.device_communicators import pynccl_wrapper

    name = "vllm.distributed.device_communicators.pynccl_wrapper.NCCLLibrary.ncclGetUniqueId"
    with contract(name, "returns an id whose bytes are its field internal"):
        assert len(bytes(pynccl_wrapper.ncclUniqueId().internal)) == 128
        source = inspect.getsource(pynccl_wrapper.NCCLLibrary.ncclGetUniqueId)
        assert "unique_id = ncclUniqueId()" in source


def test_a_communicator_of_several_frameworks_has_nobodys_settings_of_nccl() -> None:
    from vllm.utils import nccl

    with contract("vllm.utils.nccl.unpinned_nccl_env", "restores what vLLM had pinned"):
        assert "_swap_env(_unpinned_env or {})" in inspect.getsource(nccl.unpinned_nccl_env)


def test_the_platforms_of_workers_are_known_by_name() -> None:
    with contract("vllm.platforms.current_platform", "says whether it is a CPU"):
        from vllm.platforms import current_platform

        assert current_platform.is_cpu() in (True, False)
    with contract("vllm.v1.worker.cpu_worker.CPUWorker", "is a GPU's worker with other parts"):
        spec = find_spec("vllm.v1.worker.cpu_worker")  # its import replaces parts of torch
        assert spec is not None
        assert "class CPUWorker(Worker):" in Path(str(spec.origin)).read_text()
