"""The proof of freshness's needs in vLLM: the worker's extension, reloads, prompt scores."""

from __future__ import annotations

import importlib
import inspect
from types import SimpleNamespace
from typing import Any

import pytest

from tests.contracts import contract

pytestmark = pytest.mark.slow  # imports vllm

WORKERS = ("vllm.v1.worker.cpu_worker.CPUWorker", "vllm.v1.worker.gpu_worker.Worker")


def named(path: str) -> Any:
    module, _, name = path.rpartition(".")
    return getattr(importlib.import_module(module), name)


@pytest.mark.parametrize("worker", WORKERS)
def test_no_worker_has_an_attribute_of_the_extension(worker: str) -> None:
    """vllm.v1.worker.worker_base.WorkerWrapperBase.init_worker refuses the engine otherwise."""
    from rollouter.freshness_worker import FreshnessWorker

    own = {name for name in dir(FreshnessWorker) if not name.startswith("__")}
    with contract(worker, "has no attribute of rollouter.freshness_worker.FreshnessWorker"):
        assert {name for name in own if hasattr(named(worker), name)} == set()


@pytest.mark.parametrize("worker", WORKERS)
def test_a_worker_has_the_number_of_its_rank(worker: str) -> None:
    with contract(worker, "sets self.rank, which is 0 in the first worker of an engine"):
        source = inspect.getsource(named("vllm.v1.worker.worker_base.WorkerBase").__init__)
        assert "self.rank = rank" in source
        assert named("vllm.v1.worker.worker_base.WorkerBase") in named(worker).__mro__


def test_an_engine_takes_the_extension_as_a_base_of_its_worker() -> None:
    path = "vllm.v1.worker.worker_base.WorkerWrapperBase"
    with contract(path, "adds worker_extension_cls to the bases of the worker"):
        source = inspect.getsource(named(path).init_worker)
        assert "resolve_obj_by_qualname" in source
        assert "worker_class.__bases__ + (" in source


def test_transports_load_into_the_model_whose_loader_is_recorded() -> None:
    path = "vllm.v1.worker.gpu_worker.Worker"
    with contract(path, "gives model_runner.get_model() to the weight transfer engine"):
        source = inspect.getsource(named(path).load_model)
        created = source[source.index("WeightTransferEngineFactory.create_engine(") :]
        assert "self.model_runner.get_model()" in created[: created.index(")\n\n")]


def test_a_reloaded_layer_is_packed_by_its_quant_method_with_its_whole_weights() -> None:
    path = "vllm.model_executor.model_loader.reload.layerwise._layerwise_process"
    with contract(path, "loads all weights of a layer, then calls its quant_method to pack them"):
        source = inspect.getsource(named(path))
        loads = source.index("param.weight_loader(*args.args")
        assert loads < source.index("quant_method.process_weights_after_loading(layer)")


def test_prompt_log_probabilities_come_from_no_cached_prefix() -> None:
    path = "vllm.v1.request.Request"
    with contract(path, "skips the prefix cache for a request with prompt_logprobs"):
        from vllm import SamplingParams

        asking: Any = SimpleNamespace(
            sampling_params=SamplingParams(max_tokens=1, prompt_logprobs=0), pooling_params=None
        )
        assert named(path).get_skip_reading_prefix_cache(asking) is True


def test_prompt_log_probabilities_have_no_temperature() -> None:
    """Engines sample with ``processed_logprobs``, which does not reach the scores of a prompt."""
    older = "vllm.v1.worker.gpu_model_runner.GPUModelRunner"
    with contract(older, "computes prompt log-probabilities of the model's own logits"):
        source = inspect.getsource(named(older)._get_prompt_logprobs_dict)
        assert "logits = self.model.compute_logits(prompt_hidden_states)" in source
        assert "self.sampler.compute_logprobs(logits)" in source
        assert "temperature" not in source
    newer = "vllm.v1.worker.gpu.sample.prompt_logprob.PromptLogprobsWorker"
    with contract(newer, "computes prompt log-probabilities of the model's own logits"):
        source = inspect.getsource(named(newer))
        assert "logprobs_mode" in source
        assert "temperature" not in source
