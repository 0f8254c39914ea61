"""Requests to vLLM's renderer, which expands prompts with images for an engine."""

from __future__ import annotations

import inspect

import pytest

import tests.engines  # noqa: F401 - the environment, before vllm is imported
from tests.contracts import contract

pytestmark = pytest.mark.slow  # imports vllm

PROMPTS = "async_opd/media/engine_prompts.py"
PROCESSOR = "async_opd/models/processor.py"
RENDERER = "vllm.renderers.base.BaseRenderer"


def test_the_renderer_renders_a_list_of_prompts_without_other_arguments() -> None:
    from vllm.renderers.base import BaseRenderer

    name = f"{RENDERER}.render_cmpl_async"
    with contract(name, "is a coroutine that takes a list of prompts", PROMPTS):
        found = BaseRenderer.render_cmpl_async
        inspect.signature(found).bind(None, [{}])
        assert inspect.iscoroutinefunction(found)


@pytest.mark.parametrize("key", ["prompt_token_ids", "multi_modal_data", "multi_modal_uuids"])
def test_a_prompt_of_tokens_has_images_and_their_names(key: str) -> None:
    from vllm.inputs.llm import TokensPrompt

    with contract("vllm.inputs.llm.TokensPrompt", f"has {key}", PROMPTS):
        assert key in TokensPrompt.__annotations__


@pytest.mark.parametrize("key", ["prompt_token_ids", "mm_placeholders"])
def test_a_rendered_prompt_has_its_tokens_and_where_images_are(key: str) -> None:
    from vllm.inputs.engine import MultiModalInput

    with contract("vllm.inputs.engine.MultiModalInput", f"has {key}", PROMPTS):
        assert key in MultiModalInput.__annotations__


def test_the_renderer_has_the_processor_of_transformers() -> None:
    from vllm.multimodal.processing.context import BaseProcessingInfo
    from vllm.multimodal.processing.processor import BaseMultiModalProcessor
    from vllm.renderers.base import BaseRenderer

    with contract(f"{RENDERER}.get_mm_processor", "takes no arguments", PROCESSOR):
        inspect.signature(BaseRenderer.get_mm_processor).bind(None)
    made = "vllm.multimodal.processing.processor.BaseMultiModalProcessor"
    with contract(f"{made}.info", "is its model's processing info", PROCESSOR):
        assert "info" in inspect.getsource(BaseMultiModalProcessor.__init__)
        inspect.signature(BaseProcessingInfo.get_hf_processor).bind(None)


def test_the_model_says_whether_it_takes_images() -> None:
    from vllm.config import ModelConfig

    with contract("vllm.config.ModelConfig.is_multimodal_model", "is a property", PROCESSOR):
        assert isinstance(inspect.getattr_static(ModelConfig, "is_multimodal_model"), property)
