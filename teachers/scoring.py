"""How a kind of score is got out of an engine: one class per way, chosen by the spec.

    kind           device   engine     class               scores
    sampled        any      generate   PromptLogprobs      SampledLogprobs
    teacher_topk   any      generate   PromptLogprobs      TopK
    student_topk   cuda     generate   GivenTokens         CandidateLogprobs
    student_topk   cpu      pooling    GivenTokensByHead   CandidateLogprobs
    hidden         any      pooling    States              HiddenStates

All return arrays of the response positions only. An engine of the pooling kind cannot generate.
"""

from __future__ import annotations

from typing import Any, Protocol

from vllm.v1.engine.async_llm import AsyncLLM

from async_opd.core.samples import Rollout, Scores
from teachers.hidden import GivenTokensByHead, States
from teachers.prompt_logprobs import GivenTokens, PromptLogprobs
from teachers.spec import TeacherEngineSpec


class Scoring(Protocol):
    """One way to score a rollout with a response."""

    async def score(self, rollout: Rollout, request_id: str) -> Scores:
        """Its scores; ``request_id`` is new to the engine. An empty response has empty scores."""
        ...


def engine_arguments(spec: TeacherEngineSpec) -> dict[str, Any]:
    """Arguments of ``vllm.AsyncEngineArgs``: the spec's, and what its kind of score needs."""
    if spec.pooling:
        overrides = {**spec.kwargs.get("hf_overrides", {}), "head_dtype": "model"}
        return spec.kwargs | {"runner": "pooling", "convert": "embed", "hf_overrides": overrides}
    return spec.kwargs | {"max_logprobs": spec.top_k + 1}


def make_scoring(spec: TeacherEngineSpec, engine: AsyncLLM) -> Scoring:
    """The spec's way over its engine."""
    if spec.kind == "hidden":
        return States(spec, engine)
    if spec.kind == "student_topk":
        return GivenTokensByHead(spec, engine) if spec.pooling else GivenTokens(spec, engine)
    return PromptLogprobs(spec, engine)
