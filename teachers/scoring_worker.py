"""The worker of a teacher's engine: vLLM's, extended by scores of response rows from its own head.

    request with extra_args ──► vLLM's model runner ──hidden states──► RowScores
        ──► prompt_token_id_logprobs of the request's output: one array, no Python lists

vLLM computes prompt log-probabilities for every row of a prompt, request by request, and turns them
into Python lists. A teacher needs the response's rows, as arrays. Both of vLLM's model runners pass
their hidden states to an attribute that can be replaced: the older one (CPU, and models that the
newer does not support) to ``_get_prompt_logprobs_dict``, the newer one (GPU; not run yet) to its
``prompt_logprobs_worker``. docs/adr/0005-scoring-in-the-worker.md has the measurements.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead
from vllm.platforms import current_platform

from async_opd.models.lm_head import pack_again
from async_opd.processes.engine_workers import FaultReturningWorker
from teachers.rows import Chunk, RowRequest, RowScores

if current_platform.is_cpu():
    from vllm.v1.worker.cpu_worker import CPUWorker as Worker
else:
    from vllm.v1.worker.gpu_worker import Worker

torch.cpu._init_amx()  # vLLM uses AMX in bfloat16 without asking the kernel for it: SIGILL


class ScoringWorker(FaultReturningWorker, Worker):
    """``worker_cls`` names it; requests without a ``RowRequest`` are vLLM's alone."""

    def load_model(self, **options: Any) -> None:
        """Loads the model, and extends its runner by the scoring."""
        super().load_model(**options)
        install_scoring(self.model_runner)

    def reload_from(self, directory: str) -> None:
        """Replaces the weights in place, from a directory in Hugging Face format.

        On a GPU nothing is packed, and a quantized head would be processed twice.
        """
        self.reload_weights(weights_path=directory)
        if current_platform.is_cpu():
            pack_again(self.model_runner.model, ParallelLMHead)


def install_scoring(runner: Any) -> None:
    """Extends the runner by the scoring. RuntimeError for a runner of neither known kind."""
    rows = RowScores(runner.model.compute_logits, runner.model_config.get_vocab_size())
    if getattr(runner, "prompt_logprobs_worker", None) is not None:
        runner.prompt_logprobs_worker = PromptLogprobRequests(runner.prompt_logprobs_worker, rows)
    elif hasattr(runner, "_get_prompt_logprobs_dict"):
        LegacyRunnerHook(runner, rows)
    elif not hasattr(runner, "prompt_logprobs_worker"):  # None: a rank without the head
        raise RuntimeError(
            f"{type(runner).__name__} of this vLLM has neither prompt_logprobs_worker nor "
            "_get_prompt_logprobs_dict: teachers need vllm >= 0.32, < 0.34"
        )


class LegacyRunnerHook:
    """Replaces two methods of the older model runner, and calls the originals."""

    def __init__(self, runner: Any, rows: RowScores) -> None:
        self._runner = runner
        self._rows = rows
        self._answers: dict[str, torch.Tensor] = {}
        self._prompt_logprobs: Callable[..., Any] = runner._get_prompt_logprobs_dict
        self._sample_tokens: Callable[..., Any] = runner.sample_tokens
        runner._get_prompt_logprobs_dict = self.prompt_logprobs
        runner.sample_tokens = self.sample_tokens

    @torch.inference_mode()
    def prompt_logprobs(self, hidden: torch.Tensor, scheduled: dict[str, int]) -> Any:
        """The runner calls it once in each step, with the hidden states of all its tokens."""
        self._rows.keep_only(self._runner.requests)
        chunks = []
        for request_id, tokens in scheduled.items():
            request = self._runner.requests[request_id]
            params = request.sampling_params
            wanted = RowRequest.of(params and params.extra_args)
            if wanted is None:
                continue
            start = request.num_computed_tokens
            if start < wanted.end:  # a step after the last row has none of them
                self._rows.add(request_id, wanted)
                offset = self._runner.query_start_loc.np[
                    self._runner.input_batch.req_id_to_index[request_id]
                ]
                chunks.append(Chunk(request_id, start, start + tokens, int(offset)))
        self._answers = self._rows.step(hidden, chunks)
        return self._prompt_logprobs(hidden, scheduled)

    def sample_tokens(self, grammar: Any) -> Any:
        """Adds the answers of this step to its output."""
        output = self._sample_tokens(grammar)
        if self._answers:
            inner = getattr(output, "_model_runner_output", output)  # wrapped on a GPU
            inner.prompt_token_id_logprobs_dict = {
                request_id: found.cpu() for request_id, found in self._answers.items()
            }
            self._answers = {}
        return output


class PromptLogprobRequests:
    """Wraps the newer model runner's ``prompt_logprobs_worker``."""

    def __init__(self, inner: Any, rows: RowScores) -> None:
        self._inner = inner
        self._rows = rows

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def add_request(self, request_id: str, index: int, params: Any) -> None:
        """Opens the request, if it wants rows."""
        self._inner.add_request(request_id, index, params)
        wanted = RowRequest.of(params.extra_args)
        if wanted is not None:
            self._rows.add(request_id, wanted)

    def remove_request(self, request_id: str) -> None:
        """Forgets a request that ended or was aborted."""
        self._inner.remove_request(request_id)
        self._rows.forget(request_id)

    @torch.inference_mode()
    def compute_prompt_token_id_logprobs(
        self, head: Any, hidden: torch.Tensor, batch: Any, prompt_lens: Any
    ) -> dict[str, torch.Tensor]:
        """The runner calls it once in each step, with the hidden states of all its tokens."""
        answers: dict[str, torch.Tensor] = self._inner.compute_prompt_token_id_logprobs(
            head, hidden, batch, prompt_lens
        )
        chunks = []
        for index, request_id in enumerate(batch.req_ids):
            start = int(batch.num_computed_prefill_tokens_np[index])
            end = start + int(batch.num_scheduled_tokens[index])
            chunks.append(Chunk(request_id, start, end, int(batch.query_start_loc_np[index])))
        return answers | self._rows.step(hidden, chunks)
