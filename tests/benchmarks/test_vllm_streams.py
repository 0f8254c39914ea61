"""The reproduction of vLLM's streams does what vLLM does, in the same order.

Held to: ``vllm.distributed.weight_transfer.packed_tensor.packed_nccl_broadcast_producer`` and
``vllm.utils.torch_utils.current_stream``. Both are read from vLLM's files: importing vllm is slow.
"""

from __future__ import annotations

import ast
import importlib.util
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from benchmarks.gpu import vllm_streams

Log = list[tuple[Any, ...]]


def vllm_file(name: str) -> Path:
    spec = importlib.util.find_spec("vllm")
    assert spec is not None
    assert spec.submodule_search_locations
    return Path(spec.submodule_search_locations[0]) / name


@pytest.fixture
def log(monkeypatch: pytest.MonkeyPatch) -> Log:
    """What is done to streams while torch.cuda's are replaced; a stream's name is its number."""
    done: Log = []
    made: list[Any] = []

    class Stream:
        def __init__(self, device: Any = None) -> None:
            self.number = len(made)
            made.append(self)
            done.append(("made", self.number))

        def synchronize(self) -> None:
            done.append(("waited", self.number))

        def wait_stream(self, other: Any) -> None:
            done.append(("waits for", self.number, other))

    @contextmanager
    def on(stream: Stream) -> Iterator[None]:
        done.append(("enter", stream.number))
        yield
        done.append(("leave", stream.number))

    monkeypatch.setattr(torch.accelerator, "current_device_index", lambda: 0)
    monkeypatch.setattr(torch.cuda, "Stream", Stream)
    monkeypatch.setattr(torch.cuda, "stream", on)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: "default")
    monkeypatch.setattr(torch.cuda, "set_stream", lambda s: done.append(("set", s.number)))
    return done


class Group:
    """Notes the bytes of each chunk."""

    def __init__(self, log: Log) -> None:
        self.log = log

    def broadcast(self, chunk: torch.Tensor, src: int) -> None:
        self.log.append(("broadcast", bytes(chunk.tolist()), src))


def of_vllm(weights: list[tuple[str, torch.Tensor]], group: Group, size: int) -> None:
    path = vllm_file("distributed/weight_transfer/packed_tensor.py")
    spec = importlib.util.spec_from_file_location("packed_tensor_of_vllm", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    module.packed_nccl_broadcast_producer(
        iterator=iter(weights),
        group=group,
        src=0,
        post_iter_func=lambda item: item[1],
        buffer_size_bytes=size,
    )


@pytest.mark.parametrize("sizes", [[], [3], [1, 1, 1], [9], [2, 9, 1, 1, 4, 5], [5] * 7])
@pytest.mark.filterwarnings("ignore:Tensor .* exceeds buffer_size_bytes")
def test_the_packed_producer_is_that_of_vllm(sizes: list[int], log: Log) -> None:
    weights = [(str(n), torch.arange(size, dtype=torch.int16)) for n, size in enumerate(sizes)]
    of_vllm(weights, Group(log), 8)
    expected, numbers = log[:], len([one for one in log if one[0] == "made"])
    log.clear()
    vllm_streams._streams.cache_clear()
    vllm_streams.packed_producer(iter(weights), Group(log), 8, torch.device("cuda"))
    renamed = [
        (what, which - numbers if what != "broadcast" else which, *rest)
        for what, which, *rest in log
    ]
    vllm_streams._streams.cache_clear()
    assert renamed == expected


def test_the_first_call_of_current_stream_sets_a_stream_for_good_as_vllm_s(
    log: Log, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = vllm_file("utils/torch_utils.py").read_text()
    platforms = ModuleType("vllm.platforms")
    platforms.current_platform = SimpleNamespace(  # type: ignore[attr-defined]
        is_rocm=lambda: False, is_cuda=lambda: True
    )
    monkeypatch.setitem(sys.modules, "vllm", ModuleType("vllm"))
    monkeypatch.setitem(sys.modules, "vllm.platforms", platforms)
    function = next(n for n in ast.parse(text).body if getattr(n, "name", "") == "current_stream")
    source = ast.get_source_segment(text, function)
    assert source is not None
    of_thread = threading.local()
    names: dict[str, Any] = {"torch": torch, "_current_stream_tls": of_thread}

    def set_stream(stream: Any) -> None:  # as vLLM's _patched_set_stream
        of_thread.value = stream
        log.append(("set", stream.number))

    monkeypatch.setattr(torch.cuda, "set_stream", set_stream)
    exec(source, names)
    assert names["current_stream"]() is names["current_stream"]()
    expected = log[:]
    assert expected == [("made", 0), ("waits for", 0, "default"), ("set", 0)]
    log.clear()
    monkeypatch.setattr(vllm_streams, "_of_thread", threading.local())
    assert vllm_streams.current_stream() is vllm_streams.current_stream()
    assert log == [("made", 1), ("waits for", 1, "default"), ("set", 1)]
