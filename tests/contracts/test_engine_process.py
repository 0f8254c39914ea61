"""What ``async_opd.processes.forked_engine`` asks of vLLM, in ``vllm.v1.engine.utils``."""

from __future__ import annotations

import inspect

import pytest

pytestmark = pytest.mark.slow


def test_vllm_starts_the_process_of_an_engine_from_the_context_of_its_module() -> None:
    from vllm.v1.engine import utils

    source = inspect.getsource(utils.CoreEngineProcManager.__init__)
    assert "context = get_mp_context()" in source
    assert "context.Process(" in source


def test_vllm_has_one_start_method_for_workers_of_an_engine_that_is_a_fork(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from vllm.utils import system_utils

    from async_opd.models.engine_args import engine_env

    for name, value in engine_env("cpu").items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(system_utils, "is_in_ray_actor", lambda: pytest.fail("Ray was asked"))
    assert system_utils.get_mp_context().get_start_method() == "spawn"
