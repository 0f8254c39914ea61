"""The copy of the newest weights in an engine's first worker, for a trainer that is lost."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from async_opd.weight_sync.digests import Digests
from rollouter.freshness_worker import WEIGHTS, FreshnessWorker

Tensors = dict[str, torch.Tensor]


class Model(torch.nn.Module):
    """Its loader takes the tensors one after the other, and keeps none."""

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        for _, tensor in weights:
            if tensor.isnan().any():
                raise RuntimeError("connection reset")
            tensor.zero_()  # the transport's buffer has the next tensors


def worker(rank: int = 0) -> Any:
    made: Any = object.__new__(FreshnessWorker)
    model = Model()
    made.rank, made.model_runner = rank, SimpleNamespace(get_model=lambda: model)
    made.weight_transfer_engine = SimpleNamespace(adapter={}, passing=iter)
    return made


def receives(made: Any, tensors: Tensors, keeps: bool = True) -> None:
    made.record_received(keeps)
    try:
        coming = ((name, tensor.clone()) for name, tensor in tensors.items())
        made.model_runner.get_model().load_weights(made.weight_transfer_engine.passing(coming))
    finally:
        made.received_digests()


def tensors(value: float) -> Tensors:
    """One of them is a transposed view, whose elements lie in another order."""
    return {
        "a": torch.full((2, 3), value, dtype=torch.bfloat16),
        "b": torch.arange(6.0).reshape(2, 3).t() + value,
    }


def digests_of(named: Tensors) -> dict[str, str]:
    made = Digests(torch)
    for name, tensor in named.items():
        made.add(name, tensor)
    return made.values()


def test_what_was_received_last_is_written_as_it_came_with_its_digests(tmp_path: Path) -> None:
    made = worker()
    for value in (1.0, 2.0):
        receives(made, tensors(value))
    assert made.write_kept(str(tmp_path / "0"), digests_of(tensors(2.0))) == []
    found = load_file(tmp_path / "0" / WEIGHTS)
    assert found.keys() == {"a", "b"}
    for name, tensor in tensors(2.0).items():
        assert (found[name].dtype, found[name].equal(tensor)) == (tensor.dtype, True)


def test_experts_that_came_together_are_written_under_the_names_of_each(tmp_path: Path) -> None:
    made = worker()
    together = {"experts.*.gate.weight+up.weight": torch.arange(24.0).view(2, 4, 3)}
    receives(made, together)
    assert made.write_kept(str(tmp_path / "0"), digests_of(together)) == []
    found = load_file(tmp_path / "0" / WEIGHTS)
    assert found.keys() == {f"experts.{n}.{of}.weight" for n in (0, 1) for of in ("gate", "up")}
    assert found["experts.1.up.weight"].tolist() == [[18, 19, 20], [21, 22, 23]]


def test_of_an_update_that_broke_off_nothing_is_written(tmp_path: Path) -> None:
    made = worker()
    receives(made, tensors(1.0))
    broken = tensors(2.0)
    broken["b"][0, 0] = torch.nan
    with pytest.raises(RuntimeError, match="connection reset"):
        receives(made, broken)
    others = [made.write_kept(str(tmp_path / "0"), digests_of(tensors(of))) for of in (1.0, 2.0)]
    assert others == [["a", "b"], ["b"]]  # b is as it came
    assert list(tmp_path.iterdir()) == []


def test_a_host_without_memory_for_the_copy_is_named_with_the_setting_that_needs_none(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def empty(*_: Any, **__: Any) -> torch.Tensor:
        raise RuntimeError("CUDA error: out of memory")

    monkeypatch.setattr(torch, "empty", empty)
    words = (
        r"no host memory for the copy of the weights \(a, 12 bytes, after 0 MiB: CUDA error: out of"
        r" memory\): set cluster\.trainer_recovery: checkpoint"
    )
    with pytest.raises(RuntimeError, match=words):
        receives(worker(), tensors(1.0))


@pytest.mark.parametrize(("rank", "keeps"), [(1, True), (0, False)])
def test_other_workers_and_engines_that_need_not_keep_nothing(
    rank: int, keeps: bool, tmp_path: Path
) -> None:
    made = worker(rank)
    receives(made, tensors(1.0), keeps)
    assert made.write_kept(str(tmp_path / "0"), digests_of(tensors(1.0))) == ["a", "b"]
    assert list(tmp_path.iterdir()) == []
