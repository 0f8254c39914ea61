"""torch's attention of ragged rows: ``torch.nn.attention.varlen.varlen_attn``."""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch.nn.attention import varlen

from tests.contracts import contract
from tests.trainer import attention
from trainer.student.attention import Ragged
from trainer.student.attention import varlen as kernel

VARLEN = "torch.nn.attention.varlen.varlen_attn"


def test_the_reference_of_the_tests_has_torchs_interface() -> None:
    def shape(function: Any) -> list[tuple[str, Any, Any]]:
        parameters = inspect.signature(function).parameters.values()
        return [(p.name, p.kind, p.default) for p in parameters]

    with contract(VARLEN, "has the parameters of tests.trainer.attention.varlen_attn"):
        assert shape(attention.varlen_attn) == shape(varlen.varlen_attn)


def test_its_operator_takes_what_the_kernel_passes_and_has_a_backward_pass() -> None:
    """On the device ``meta``: the operators' schemas, types and shapes, not their values."""

    def tensor(heads: int) -> torch.Tensor:
        made = torch.empty(12, heads, 64, dtype=torch.bfloat16, device="meta")
        return made.requires_grad_()

    starts = torch.empty(3, dtype=torch.int32, device="meta")
    query, key, value = tensor(4), tensor(2), tensor(2)
    for window in (None, 5):
        with contract(VARLEN, "computes forward and backward with fewer heads of keys"):
            out = kernel(query, key, value, Ragged(starts, 7, 0.125, window, None))
            assert (out.shape, out.dtype) == (query.shape, torch.bfloat16)
            gradients = torch.autograd.grad(out.sum(), (query, key, value))
            assert [g.shape for g in gradients] == [query.shape, key.shape, value.shape]


def test_a_window_counts_the_keys_before_the_query() -> None:
    """Flash attention's meaning, to which torch passes the window on unchanged."""
    with contract(VARLEN, "passes the window on to flash attention"):
        source = inspect.getsource(varlen._varlen_attn._init_fn)
        assert "window_size_left=window_size[0]" in source
        assert "window_size_right=window_size[1]" in source
        assert "is_causal = window_size == (-1, 0)" in inspect.getsource(varlen.varlen_attn)


def test_its_backward_pass_ignores_the_gradient_of_the_log_sum_exp() -> None:
    """Why sinks, which transformers applies to the log-sum-exp, are not computed with it."""
    with contract("torch.nn.attention.varlen._backward", "leaves grad_lse out"):
        assert inspect.getsource(varlen._backward).count("grad_lse") == 1  # the parameter
