"""A teacher's scores out of vLLM's V2 model runner, the one of GPUs; without one.

    add_requests    ┐
    finish_requests ├─► GPUModelRunner ─► PromptLogprobRequests ─► RowScores
    sample_tokens   ┘         │            (InputBatch, hidden states)
                              ▼
                  AsyncOutput.get_output ─► prompt_token_id_logprobs_dict

Real are the runner's methods, its prompt_logprobs_worker, its batch and its output. Replaced are
the model, Triton's kernels, CUDA's streams, and what of the runner takes no part in scoring.
"""

from __future__ import annotations

import dataclasses
import inspect
import sys
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import numpy as np
import pytest
import torch

from tests.contracts import contract

pytestmark = pytest.mark.slow  # imports vllm

HIDDEN, VOCABULARY = 4, 7
RUNNER = "vllm.v1.worker.gpu.model_runner.GPUModelRunner"
SCORES = "vllm.v1.worker.gpu.sample.prompt_logprob.PromptLogprobsWorker"
OLDER = "vllm.v1.worker.gpu_model_runner.GPUModelRunner"
US = "teachers/scoring_worker.py"
WORKER = "vllm.v1.worker.gpu_worker.Worker"
WEIGHT = torch.randn(VOCABULARY, HIDDEN, generator=torch.Generator().manual_seed(0))
STATES = torch.randn(8, HIDDEN, generator=torch.Generator().manual_seed(1))
"""Of the tokens of a request of 8 tokens; every request of a test has the same ones."""
SAMPLED = np.arange(3, dtype=np.int32)[:, None] + 2
"""The tokens to score, at rows 4, 5 and 6."""


def head(states: torch.Tensor) -> torch.Tensor:
    return states @ WEIGHT.T


def expected() -> torch.Tensor:
    return head(STATES[4:7]).log_softmax(-1).gather(1, torch.from_numpy(SAMPLED).long())


def ours() -> Any:
    """A request as ``teachers.scoring`` makes it. Its last token is the one of its last row."""
    from vllm import SamplingParams

    from teachers.rows import RowRequest

    wanted = RowRequest(((4, 7),), SAMPLED.tobytes(), 1)
    return SamplingParams(max_tokens=1, extra_args=wanted.arguments())


def theirs() -> Any:
    """A request for the same scores by vLLM's own means."""
    from vllm import SamplingParams

    return SamplingParams(
        max_tokens=1, prompt_logprob_token_ids=SAMPLED.astype(np.int64), prompt_logprob_start=4
    )


@pytest.fixture
def gpu_worker(monkeypatch: pytest.MonkeyPatch) -> Any:
    """``teachers.scoring_worker`` as a process with a GPU imports it.

    On a CPU it would import vLLM's worker of CPUs, which replaces parts of torch for good.
    """
    import vllm.v1.worker.gpu_worker  # noqa: F401 - before its imports ask for the platform
    from vllm.platforms import current_platform

    monkeypatch.setattr(current_platform, "is_cpu", lambda: False)
    monkeypatch.delitem(sys.modules, "teachers.scoring_worker", raising=False)
    import teachers.scoring_worker as module

    monkeypatch.delitem(sys.modules, "teachers.scoring_worker")
    return module


@pytest.fixture
def runner(gpu_worker: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A GPUModelRunner after ``install_scoring``, as ScoringWorker.load_model leaves it."""
    from vllm.v1.worker.gpu.async_utils import AsyncOutput  # noqa: F401 - before Event is replaced
    from vllm.v1.worker.gpu.model_runner import GPUModelRunner
    from vllm.v1.worker.gpu.sample import prompt_logprob

    monkeypatch.setattr(torch.cuda, "Event", MagicMock())
    monkeypatch.setattr(torch.cuda, "set_stream", lambda stream: None)
    monkeypatch.setattr(
        prompt_logprob,
        "compute_token_logprobs",
        lambda logits, ids: logits.log_softmax(-1).gather(1, ids),
    )
    made: Any = object.__new__(GPUModelRunner)
    parts = ("eplb", "req_states", "model_state", "block_tables", "lora_state", "sampler")
    made.__dict__ |= {name: MagicMock() for name in (*parts, "kv_connector", "main_stream")}
    made.output_copy_stream = made.main_stream
    nothing = ("pooling_runner", "pp_handler", "encoder_cache", "pcp_manager", "speculator")
    made.__dict__ |= dict.fromkeys((*nothing, "adaptive_verification", "aux_output_connector"))
    made.is_last_pp_rank, made.check_ep_fault, made.num_speculative_steps = True, False, 0
    made.req_states.req_id_to_index = {}
    made.req_states.remove_request = lambda name: made.req_states.req_id_to_index.pop(name, None)
    made.req_states.prompt_len.np = np.full(8, 8)
    made.model = SimpleNamespace(compute_logits=head)
    made.model_config = SimpleNamespace(get_vocab_size=lambda: VOCABULARY)
    made.sample = lambda hidden, batch, grammar: sampled(len(batch.req_ids))
    made.postprocess_sampled = lambda *_: None
    made.execute_model_state = None
    with contract(SCORES, "is made of max_num_reqs and device", by=US):
        made.prompt_logprobs_worker = prompt_logprob.PromptLogprobsWorker(8, torch.device("cpu"))
    gpu_worker.install_scoring(made)
    return made


def sampled(count: int) -> Any:
    from vllm.v1.worker.gpu.sample.output import SamplerOutput

    ones = torch.ones(count, dtype=torch.int32)
    output = SamplerOutput(torch.zeros(count, 1, dtype=torch.int64), None, None, ones, ones * 0)
    return output, ones, ones * 0


def add(runner: Any, **params: Any) -> None:
    """The scheduler's new requests, or preempted ones that it resumes."""
    requests = []
    for name, wanted in params.items():
        runner.req_states.req_id_to_index[name] = len(runner.req_states.req_id_to_index)
        made = MagicMock(req_id=name, prompt_len=8, sampling_params=wanted)
        requests.append(made)
    index = dict(runner.req_states.req_id_to_index)
    runner.req_states.add_request = lambda req_id, **_: (
        runner.req_states.req_id_to_index.__setitem__(req_id, index[req_id])
    )
    with contract(
        f"{RUNNER}.add_requests", "adds every request to the prompt_logprobs_worker", by=US
    ):
        runner.add_requests(SimpleNamespace(scheduled_new_reqs=requests))


def step(runner: Any, **tokens: tuple[int, int]) -> dict[str, torch.Tensor]:
    """One step that computes tokens ``start`` to before ``end`` of each request, in this order."""
    from vllm.v1.worker.gpu.input_batch import InputBatch
    from vllm.v1.worker.gpu.model_runner import ExecuteModelState

    counts = [end - start for start, end in tokens.values()]
    index = runner.req_states.req_id_to_index
    values = dict.fromkeys(field.name for field in dataclasses.fields(InputBatch))
    given = {
        "req_ids": list(tokens),
        "idx_mapping_np": np.array([index[name] for name in tokens]),
        "num_scheduled_tokens": np.array(counts, dtype=np.int32),
        "query_start_loc_np": np.array([0, *np.cumsum(counts)], dtype=np.int32),
        "num_computed_prefill_tokens_np": np.array([start for start, _ in tokens.values()]),
        "prefill_len_np": np.full(len(tokens), 8),
    }
    with contract(
        "vllm.v1.worker.gpu.input_batch.InputBatch", f"has the fields {list(given)}", by=US
    ):
        assert given.keys() <= values.keys()
    batch: Any = InputBatch(**(values | given))
    hidden = torch.cat([STATES[start:end] for start, end in tokens.values()])
    state = dict.fromkeys(ExecuteModelState._fields)
    more = {"input_batch": batch, "hidden_states": hidden, "num_spec_tokens_to_schedule": 0}
    runner.execute_model_state = ExecuteModelState(**(state | more))
    with contract(
        f"{RUNNER}.sample_tokens", "asks the prompt_logprobs_worker for scores by id", by=US
    ):
        output = runner.sample_tokens(None).get_output()
        found: dict[str, torch.Tensor] = output.prompt_token_id_logprobs_dict
    return found


def scores(found: torch.Tensor) -> torch.Tensor:
    return found.view(torch.float32) if found.dtype == torch.int32 else found


def test_scores_come_out_with_the_step_that_computes_their_last_row(runner: Any) -> None:
    add(runner, other=plain(), ours=ours())
    assert step(runner, other=(0, 3), ours=(0, 5)) == {}
    with contract(f"{RUNNER}.sample_tokens", "returns the prompt_logprobs_worker's scores", by=US):
        found = step(runner, other=(3, 4), ours=(5, 7))
        assert found.keys() == {"ours"}
        torch.testing.assert_close(scores(found["ours"]), expected())


def plain() -> Any:
    from vllm import SamplingParams

    return SamplingParams(max_tokens=1)


def test_a_batchs_fields_mean_what_vllms_own_scores_by_id_take_them_for(runner: Any) -> None:
    add(runner, ours=ours(), theirs=theirs())
    assert step(runner, theirs=(0, 5), ours=(0, 6)) == {}
    found = step(runner, theirs=(5, 8), ours=(6, 7))
    with contract(f"{SCORES}.compute_prompt_token_id_logprobs", "reads the batch as we do", by=US):
        torch.testing.assert_close(found["theirs"], expected())
        torch.testing.assert_close(scores(found["ours"]), scores(found["theirs"]))


def test_a_preempted_request_begins_again(runner: Any) -> None:
    add(runner, ours=ours())
    step(runner, ours=(0, 6))
    preempted = SimpleNamespace(finished_req_ids=set(), preempted_req_ids={"ours"})
    with contract(
        f"{RUNNER}._remove_request", "notifies the prompt_logprobs_worker of preemptions", by=US
    ):
        runner.finish_requests(preempted)
        assert runner.prompt_logprobs_worker._rows._open == {}
    add(runner, ours=ours())
    torch.testing.assert_close(scores(step(runner, ours=(0, 7))["ours"]), expected())


def test_an_aborted_request_is_forgotten(runner: Any) -> None:
    add(runner, ours=ours())
    ended = SimpleNamespace(finished_req_ids={"ours"}, preempted_req_ids=None)
    with contract(
        f"{RUNNER}._remove_request", "notifies the prompt_logprobs_worker of the end", by=US
    ):
        runner.finish_requests(ended)
        assert runner.prompt_logprobs_worker._rows._open == {}


def test_rows_that_the_prefix_cache_held_are_an_answer_without_rows(runner: Any) -> None:
    """The step begins behind row 4; the caller asks again without the cache."""
    add(runner, ours=ours())
    assert len(step(runner, ours=(5, 7))["ours"]) == 0


# ── where the scoring is installed ─────────────────────────────────────────────────────────────


def test_the_runner_has_its_place_for_scores_when_its_model_is_loaded() -> None:
    from vllm.v1.worker.gpu.model_runner import GPUModelRunner

    with contract(
        f"{RUNNER}.load_model", "makes the prompt_logprobs_worker, and keeps the model", by=US
    ):
        source = inspect.getsource(GPUModelRunner.load_model)
        assert "self.prompt_logprobs_worker = PromptLogprobsWorker(" in source
        assert "self.model = " in source
    with contract(RUNNER, "says None there in a rank without the head", by=US):
        assert "self.prompt_logprobs_worker: PromptLogprobsWorker | None = None" in (
            inspect.getsource(GPUModelRunner.__init__)
        )


def test_the_scoring_worker_is_that_of_gpus(gpu_worker: Any, runner: Any) -> None:
    from vllm.v1.worker.gpu_worker import Worker

    worker = object.__new__(gpu_worker.ScoringWorker)
    assert isinstance(worker, Worker)
    with contract(f"{WORKER}.load_model", "takes load_dummy_weights, and loads by model_runner"):
        inspect.signature(Worker.load_model).bind(worker, load_dummy_weights=False)
        assert "self.model_runner.load_model(" in inspect.getsource(Worker.load_model)
    with contract(f"{WORKER}._make_model_runner", "makes one of the two runners that we know"):
        source = inspect.getsource(Worker._make_model_runner)
        assert "if self.use_v2_model_runner:" in source
        for name in (RUNNER, OLDER):
            module, _, made = name.rpartition(".")
            assert f"from {module} import" in source
            assert made in source
    with contract(f"{WORKER}.reload_weights", "passes weights_path on to both runners"):
        assert "self.model_runner.reload_weights(*args, **kwargs)" in (
            inspect.getsource(Worker.reload_weights)
        )
        inspect.signature(type(runner).reload_weights).bind(runner, weights_path="folder")


def test_a_reload_on_gpus_leaves_the_head_to_vllm(gpu_worker: Any) -> None:
    """vLLM's layer-wise reload has processed its weights; a quantized head bears that once."""
    worker = object.__new__(gpu_worker.ScoringWorker)
    head, reloaded = MagicMock(spec=gpu_worker.ParallelLMHead), []
    head.quant_method = MagicMock()
    worker.model_runner = SimpleNamespace(model=SimpleNamespace(modules=lambda: [head]))
    worker.reload_weights = lambda weights_path: reloaded.append(weights_path)
    worker.reload_from("folder")
    assert reloaded == ["folder"]
    head.quant_method.process_weights_after_loading.assert_not_called()


def test_the_worker_that_the_arguments_name_is_kept_on_gpus() -> None:
    from importlib.util import find_spec
    from pathlib import Path

    with contract(
        "vllm.platforms.cuda.CudaPlatformBase", "replaces the worker_cls auto only", by=US
    ):
        spec = find_spec("vllm.platforms.cuda")
        assert spec is not None
        source = Path(str(spec.origin)).read_text()
        (line,) = [line for line in source.splitlines() if "worker_cls = " in line]
        assert (
            source.partition(line)[0].rstrip().endswith('if parallel_config.worker_cls == "auto":')
        )


# ── the older runner, which vLLM takes on GPUs for what the newer does not support ─────────────


def test_the_older_runner_has_the_methods_that_are_replaced() -> None:
    from vllm.v1.worker import gpu_model_runner

    older = gpu_model_runner.GPUModelRunner
    with contract(
        f"{OLDER}._get_prompt_logprobs_dict", "takes hidden states and scheduled tokens", by=US
    ):
        names = list(inspect.signature(older._get_prompt_logprobs_dict).parameters)
        assert names == ["self", "hidden_states", "num_scheduled_tokens"]
        assert "self._get_prompt_logprobs_dict(" in inspect.getsource(older._bookkeeping_sync)
    with contract(
        f"{OLDER}.sample_tokens", "takes the grammar, and calls _bookkeeping_sync", by=US
    ):
        assert list(inspect.signature(older.sample_tokens).parameters)[1:] == ["grammar_output"]
        assert "self._bookkeeping_sync(" in inspect.getsource(older.sample_tokens)
    wrapped = "vllm.v1.worker.gpu_model_runner.AsyncGPUModelRunnerOutput"
    with contract(wrapped, "keeps its output as _model_runner_output, and returns it", by=US):
        source = inspect.getsource(gpu_model_runner.AsyncGPUModelRunnerOutput)
        assert "self._model_runner_output = model_runner_output" in source
        assert "output = self._model_runner_output" in source
        assert "return output" in source


def test_an_output_has_the_field_of_scores_by_id() -> None:
    from vllm.v1.outputs import ModelRunnerOutput

    with contract("vllm.v1.outputs.ModelRunnerOutput", "has prompt_token_id_logprobs_dict", by=US):
        assert "prompt_token_id_logprobs_dict" in ModelRunnerOutput.__dataclass_fields__
