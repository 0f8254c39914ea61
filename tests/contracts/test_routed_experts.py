"""The parts of vLLM for routing replay: the argument, the output, and where there is neither."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from tests.contracts import contract
from tests.engines import QUICKSTART, kwargs

pytestmark = pytest.mark.slow  # imports vllm


def test_an_engine_takes_the_argument_and_an_output_has_the_experts() -> None:
    with contract("vllm.AsyncEngineArgs", "enable_return_routed_experts"):
        from vllm import AsyncEngineArgs
        from vllm.outputs import CompletionOutput

        made = AsyncEngineArgs(model="m", enable_return_routed_experts=True)
        assert made.aux_output_config.enable_return_routed_experts
        assert "routed_experts" in CompletionOutput.__dataclass_fields__


def test_all_tokens_but_the_last_have_experts() -> None:
    with contract("vllm's AuxOutputConnector.take_output", "num_tokens - 1 rows"):
        from vllm.distributed.aux_output_connector import connector

        kind: Any = next(one for one in vars(connector).values() if hasattr(one, "take_output"))
        rows = np.zeros((9, 2, 2), np.uint8)
        given = {"r": SimpleNamespace(token_start=0, rows=rows)}
        request: Any = SimpleNamespace(request_id="r", num_tokens=8, is_finished=lambda: True)
        assert len(kind.take_output(object.__new__(kind), request, given)) == 7


def test_on_a_cpu_it_is_refused() -> None:
    with contract("vllm.config.VllmConfig", "routed experts from model runner V2 only"):
        from vllm import AsyncEngineArgs

        arguments = kwargs(QUICKSTART / "models" / "student")
        with pytest.raises(Exception, match="requires Model Runner V2"):
            AsyncEngineArgs(**arguments, enable_return_routed_experts=True).create_engine_config()
