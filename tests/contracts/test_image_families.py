"""The arguments of processors, and both libraries' models of every family that is taken."""

from __future__ import annotations

import inspect

import pytest

from async_opd.models.families import TAKEN
from tests.contracts import contract

pytestmark = pytest.mark.slow  # imports vllm and transformers' models

MIXIN = "transformers.processing_utils.ProcessorMixin"


@pytest.mark.parametrize("kind", TAKEN)
def test_both_libraries_have_a_model_of_the_same_name(kind: str) -> None:
    from transformers.models.auto import modeling_auto
    from vllm.model_executor.models.registry import ModelRegistry

    mapping = modeling_auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES
    with contract("vllm.model_executor.models.registry.ModelRegistry", f"has {mapping[kind]}"):
        assert mapping[kind] in ModelRegistry.get_supported_archs()


@pytest.mark.parametrize("kind", TAKEN)
def test_a_processor_says_how_many_tokens_an_image_has(kind: str) -> None:
    from transformers.models.auto.processing_auto import (
        PROCESSOR_MAPPING_NAMES,
        processor_class_from_name,
    )

    processor = processor_class_from_name(PROCESSOR_MAPPING_NAMES[kind])
    with contract(f"{MIXIN}._get_num_multimodal_tokens", "counts from sizes"):
        assert "image_sizes" in inspect.signature(processor._get_num_multimodal_tokens).parameters
