"""vLLM's executor in a Ray placement group: ``vllm.config.parallel.ParallelConfig.__post_init__``.

An engine of several GPUs lies in a placement group (``async_opd.cluster.placement``). vLLM would
start its workers as Ray actors there, which find no free GPU: the engine's actor has them all.
"""

from __future__ import annotations

from typing import Any

import pytest

from async_opd.config.sections.engine import EngineConfig
from async_opd.models.engine_args import engine_kwargs

pytestmark = pytest.mark.slow


@pytest.fixture
def in_a_placement_group(monkeypatch: pytest.MonkeyPatch) -> None:
    import ray
    import ray.util

    monkeypatch.setattr(ray, "is_initialized", lambda: True)
    monkeypatch.setattr(ray.util, "get_current_placement_group", lambda: object())


def backend(**kwargs: Any) -> Any:
    from vllm.config.parallel import ParallelConfig

    return ParallelConfig(**kwargs).distributed_executor_backend


@pytest.mark.usefixtures("in_a_placement_group")
def test_vllm_takes_ray_for_several_gpus_by_default() -> None:
    assert backend(tensor_parallel_size=2) == "ray"


@pytest.mark.usefixtures("in_a_placement_group")
@pytest.mark.parametrize(("tensor_parallel", "expected"), [(1, "uni"), (2, "mp"), (8, "mp")])
def test_our_engines_workers_are_its_own_processes(tensor_parallel: int, expected: str) -> None:
    kwargs = engine_kwargs(
        EngineConfig(),
        model="m",
        device="cuda",
        tensor_parallel=tensor_parallel,
        seed=0,
        trust_remote_code=False,
    )
    given = {
        name: kwargs[name]
        for name in ("tensor_parallel_size", "distributed_executor_backend")
        if name in kwargs
    }
    assert backend(**given) == expected
