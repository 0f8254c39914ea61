"""vLLM's heads in float32: ``ModelConfig.head_dtype`` and ``LogitsProcessor._apply_head``."""

from __future__ import annotations

import inspect
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.contracts import contract

pytestmark = pytest.mark.slow  # imports vllm

APPLY = "vllm.model_executor.layers.logits_processor.LogitsProcessor._apply_head"
HEAD_DTYPE = {"head_dtype": "float32"}
"""The hf_overrides of ``models.engine_args``."""


def test_an_override_of_head_dtype_is_the_dtype_of_a_generating_models_head() -> None:
    """vllm.config.model._get_head_dtype, which ``ModelConfig.head_dtype`` returns."""
    from vllm.config.model import ModelConfig, _get_head_dtype

    overridden: Any = SimpleNamespace(**HEAD_DTYPE)
    plain: Any = SimpleNamespace()
    with contract("vllm.config.model._get_head_dtype", "takes the override head_dtype"):
        assert _get_head_dtype(overridden, torch.bfloat16, "generate") == torch.float32
        assert _get_head_dtype(plain, torch.bfloat16, "generate") == torch.bfloat16
    with contract("vllm.config.model.ModelConfig.head_dtype", "returns _get_head_dtype's dtype"):
        assert "_get_head_dtype" in inspect.getsource(ModelConfig.head_dtype.fget)


def applied(method: Any, dtype: torch.dtype) -> torch.Tensor:
    """LogitsProcessor._apply_head of bfloat16 states [8, 64] and a head [40, 64]."""
    from vllm.model_executor.layers.logits_processor import LogitsProcessor

    torch.manual_seed(0)
    head: Any = SimpleNamespace(weight=torch.randn(40, 64).bfloat16(), quant_method=method)
    processor: Any = SimpleNamespace(head_dtype=dtype)
    states = torch.randn(8, 64).bfloat16()
    return LogitsProcessor._apply_head(processor, head, states, None)


def test_a_float32_head_of_bfloat16_states_has_no_steps_of_bfloat16() -> None:
    from vllm.model_executor.layers.vocab_parallel_embedding import UnquantizedEmbeddingMethod

    with contract(APPLY, "computes float32 logits of bfloat16 states"):
        logits = applied(UnquantizedEmbeddingMethod(), torch.float32)
        assert logits.dtype == torch.float32
        steps = (logits - logits.bfloat16().float()).abs().max()
        assert steps > 0.01


def test_a_quantized_head_is_refused_in_float32() -> None:
    """The reason why ``async_opd check`` asks for ``head_dtype: model`` there."""
    with (
        contract(APPLY, "refuses a quantized head in another dtype"),
        pytest.raises(ValueError, match="only supported for an unquantized lm_head"),
    ):
        applied(object(), torch.float32)


def test_the_product_on_a_gpu_is_that_of_the_trainer() -> None:
    """bfloat16 operands, float32 results: ``trainer.losses.chunked.project``."""
    from vllm.model_executor.layers.logits_processor import LogitsProcessor

    from trainer.losses.chunked import project

    product = "torch.mm({}, {}weight.t(), out_dtype="
    with contract(APPLY, "multiplies by torch.mm with out_dtype on a GPU"):
        source = inspect.getsource(LogitsProcessor._apply_head)
        assert product.format("flat", "lm_head.") in source
    assert product.format("rows", "") in inspect.getsource(project)
