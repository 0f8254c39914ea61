"""How scores get out of vLLM's two model runners, on stand-ins for them."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import tests.engines  # noqa: F401 - the environment, before vllm is imported

pytestmark = pytest.mark.engine

HIDDEN, VOCABULARY = 4, 7


def head(states: Any) -> Any:
    import torch

    weight = torch.randn(VOCABULARY, HIDDEN, generator=torch.Generator().manual_seed(0))
    return states @ weight.T


def request(start: int, rows: int) -> Any:
    from teachers.rows import RowRequest

    ids = np.arange(rows, dtype=np.int32)[:, None]
    return SimpleNamespace(
        extra_args=RowRequest(((start, start + rows),), ids.tobytes(), 1).arguments()
    )


def runner(**parts: Any) -> Any:
    return SimpleNamespace(
        model=SimpleNamespace(compute_logits=head),
        model_config=SimpleNamespace(get_vocab_size=lambda: VOCABULARY),
        **parts,
    )


def expected(states: Any, rows: int) -> Any:
    import torch

    return head(states).log_softmax(-1).gather(1, torch.arange(rows)[:, None]).numpy()


def numbers(found: Any) -> Any:
    return found.numpy().view(np.float32)


class PromptLogprobRequests:
    """The newer runner's place: here it has another answer."""

    token_id_scores: dict[str, Any] = {}  # noqa: RUF012

    def __init__(self) -> None:
        self.seen: list[str] = []

    def add_request(self, request_id: str, index: int, params: Any) -> None:
        self.seen.append(f"+{request_id}")

    def remove_request(self, request_id: str) -> None:
        self.seen.append(f"-{request_id}")

    def compute_prompt_token_id_logprobs(self, *step: Any) -> dict[str, Any]:
        return {"theirs": 1}


def newer() -> Any:
    from teachers.scoring_worker import install_scoring

    made = runner(prompt_logprobs_worker=PromptLogprobRequests())
    install_scoring(made)
    return made.prompt_logprobs_worker


def step(place: Any, states: Any, requests: dict[str, tuple[int, int]]) -> Any:
    """One step with tokens (start, count) of each request, in order."""
    counts = [count for _, count in requests.values()]
    batch = SimpleNamespace(
        req_ids=list(requests),
        num_computed_prefill_tokens_np=np.array([start for start, _ in requests.values()]),
        num_scheduled_tokens=np.array(counts),
        query_start_loc_np=np.array([0, *np.cumsum(counts)]),
    )
    return place.compute_prompt_token_id_logprobs(head, states, batch, None)


def test_the_newer_runner_answers_with_its_own_scores_and_ours() -> None:
    import torch

    place, states = newer(), torch.randn(6, HIDDEN)
    place.add_request("a", 0, SimpleNamespace(extra_args=None))
    place.add_request("b", 1, request(1, 3))
    found = step(place, states, {"a": (0, 2), "b": (0, 4)})
    assert found["theirs"] == 1
    np.testing.assert_allclose(numbers(found["b"]), expected(states[3:], 3), atol=1e-6)


def test_the_newer_runner_forgets_what_is_removed() -> None:
    import torch

    place = newer()
    place.add_request("b", 0, request(0, 2))
    place.remove_request("b")
    assert step(place, torch.randn(2, HIDDEN), {"b": (0, 2)}) == {"theirs": 1}


def test_the_newer_runners_other_methods_are_its_own() -> None:
    place = newer()
    assert place.token_id_scores == {}


def older(requests: dict[str, Any]) -> Any:
    from teachers.scoring_worker import install_scoring

    made = runner(
        requests=requests,
        input_batch=SimpleNamespace(req_id_to_index={name: i for i, name in enumerate(requests)}),
        query_start_loc=SimpleNamespace(np=np.array([0, 2, 6])),
        _get_prompt_logprobs_dict=lambda hidden, scheduled: {"theirs": 1},
        sample_tokens=lambda grammar: SimpleNamespace(),
    )
    install_scoring(made)
    return made


def state(params: Any, computed: int = 0) -> Any:
    return SimpleNamespace(sampling_params=params, num_computed_tokens=computed)


def test_the_older_runner_puts_scores_into_its_output() -> None:
    import torch

    made = older({"a": state(SimpleNamespace(extra_args=None)), "b": state(request(1, 3))})
    states = torch.randn(6, HIDDEN)
    assert made._get_prompt_logprobs_dict(states, {"a": 2, "b": 4}) == {"theirs": 1}
    found = made.sample_tokens(None).prompt_token_id_logprobs_dict["b"]
    np.testing.assert_allclose(numbers(found), expected(states[3:], 3), atol=1e-6)


def test_scores_come_out_once() -> None:
    import torch

    made = older({"a": state(SimpleNamespace(extra_args=None)), "b": state(request(1, 3))})
    made._get_prompt_logprobs_dict(torch.randn(6, HIDDEN), {"a": 2, "b": 4})
    made.sample_tokens(None)
    assert not hasattr(made.sample_tokens(None), "prompt_token_id_logprobs_dict")


def test_a_runner_without_such_a_place_is_refused_at_start() -> None:
    from teachers.scoring_worker import install_scoring

    with pytest.raises(RuntimeError, match=r"vllm >= 0\.32, < 0\.34"):
        install_scoring(runner())


def test_a_teacher_on_a_cpu_packs_its_head_and_experts_again_after_a_reload() -> None:
    from unittest.mock import MagicMock

    from teachers.scoring_worker import ParallelLMHead, ScoringWorker

    head, experts = MagicMock(spec=ParallelLMHead), MagicMock()
    head.quant_method, plain = MagicMock(), SimpleNamespace()
    worker: Any = object.__new__(ScoringWorker)
    worker.reload_weights = lambda weights_path: None
    modules = [head, experts, plain]
    worker.model_runner = SimpleNamespace(model=SimpleNamespace(modules=lambda: modules))
    worker.reload_from("folder")
    head.quant_method.process_weights_after_loading.assert_called_once_with(head)
    packed = experts.quant_method.moe_kernel.fused_experts.process_weights_after_loading
    packed.assert_called_once_with(experts)
