"""A weight transport is one module and one entry of the registry; gloo and nccl are two of them."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import get_args

import pytest
import torch

from async_opd.config.registry import TRANSPORTS
from async_opd.config.sections.sync import SyncConfig
from async_opd.core.errors import StageError
from async_opd.weight_sync.layout import WeightMeta
from rollouter.transports import chosen, chunks, transport

EXAMPLE = Path(__file__).parents[2] / "examples" / "quickstart.yaml"
HERE = Path(__file__).parent

RUN_OF_A_THIRD = """
import json, sys, threading
from async_opd.config.registry import TRANSPORTS
from async_opd.models import torchvision_operators
TRANSPORTS["third"] = "third"
torchvision_operators.install()  # as a replica does

import torch
from async_opd.cluster.trainer_actor import _transport
from async_opd.config.load import load_config
from rollouter.transports import chosen, chunks, transport
from rollouter.transports.engine import ChunkEngine, ChunkInitInfo
from trainer.publisher import Publisher

config = load_config(sys.argv[1], ["sync.backend=third", "sync.chunk_mib=1"])
weights = [(f"w{i}", torch.randn(300_000, dtype=torch.bfloat16)) for i in range(4)]
publisher = Publisher(lambda: iter(weights), lambda: _transport(config, "cpu"))
module = transport(chosen(config.sync.backend, "cpu"))
at = publisher.open(0, 3)
told = json.loads(json.dumps(chunks.chunk_info(module.__name__, at)))
engines = [object.__new__(ChunkEngine) for _ in range(2)]
class parallel: data_parallel_index = 0; world_size = 1; rank = 0
def join(engine, rank):
    engine.parallel_config = parallel
    engine.init_transfer_engine(ChunkInitInfo(rank_offset=rank, world_size=3, **told))
joining = [threading.Thread(target=join, args=(e, 1 + i)) for i, e in enumerate(engines)]
[thread.start() for thread in joining]
publisher.connect(0)
[thread.join() for thread in joining]
meta = publisher.snapshot()
got = {}
def receive(engine, name):
    got[name] = torch.cat([buffer for _, buffer in engine._chunks(engine._receiver, meta)])
receiving = [threading.Thread(target=receive, args=(e, i)) for i, e in enumerate(engines)]
[thread.start() for thread in receiving]
publisher.send(0)
[thread.join() for thread in receiving]
sent = torch.cat([weight.view(torch.uint8) for _, weight in weights])
print(json.dumps({"module": type(publisher._transports[0]).__module__, "chunks": told["at"],
                  "same": [bool(torch.equal(got[i], sent)) for i in range(2)]}))
"""


@pytest.mark.slow
def test_a_third_transport_is_one_module_and_one_entry(tmp_path: Path) -> None:
    """The config takes its name, the publisher sends through it, and two engines receive."""
    shutil.copy(HERE / "tcp_transport.py", tmp_path / "third.py")
    (tmp_path / "run.py").write_text(RUN_OF_A_THIRD)
    path = [str(HERE.parents[1]), str(tmp_path), os.environ["PYTHONPATH"]]
    done = subprocess.run(
        [sys.executable, str(tmp_path / "run.py"), str(EXAMPLE)],
        capture_output=True,
        text=True,
        timeout=240,
        cwd=HERE.parents[1],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(path)},
    )
    assert done.returncode == 0, done.stderr
    said = json.loads(done.stdout.splitlines()[-1])
    assert (said["module"], said["same"]) == ("third", [True, True])


def test_the_config_takes_the_names_of_the_registry_and_nccl_needs_a_gpu() -> None:
    assert get_args(SyncConfig.model_fields["backend"].annotation) == ("auto", *TRANSPORTS)
    with pytest.raises(StageError, match="is nccl but the pools are on CPU"):
        chosen("nccl", "cpu")


@pytest.mark.parametrize("name", TRANSPORTS)
def test_every_entry_is_a_module_with_both_ends(name: str) -> None:
    module = transport(name)
    assert set(module.DEVICES) <= {"cpu", "cuda"}
    assert callable(module.sender)
    assert callable(module.receiver)


def test_the_driver_and_the_trainer_get_no_vllm_and_no_torch_with_the_modules() -> None:
    names = ", ".join(repr(name) for name in TRANSPORTS.values())
    code = (
        f"import importlib, sys; [importlib.import_module(name) for name in ({names},)]; "
        "sys.exit(', '.join(sorted({'torch', 'vllm'} & sys.modules.keys())) or 0)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr


class Slow(chunks.Sender):
    """Takes three seconds to send a chunk, on a clock that ticks by calls of it."""

    clock = 0.0

    def listen(self) -> tuple[str, int, bytes]:
        return "", 0, b""

    def connect(self) -> None: ...

    def close(self) -> None: ...

    def send(self, chunk: torch.Tensor, timeout_s: float) -> None:
        self.clock += 3.0
        self.allowed_s = timeout_s


def test_a_broadcast_may_take_longer_the_more_bytes_it_has(monkeypatch: pytest.MonkeyPatch) -> None:
    """64 GB within 90 s would be 0.7 GB/s; at 128 MiB/s they have 500 s more."""
    sender = Slow("", 90.0, 1 << 20)
    sender.seconds_per_byte = SyncConfig(min_mib_per_s=128).seconds_per_byte
    monkeypatch.setattr(chunks, "time", SimpleNamespace(perf_counter=float, monotonic=float))
    meta = WeightMeta(("a",), ("float32",), ((1 << 34,),), (4,))  # 64 GiB
    sender.broadcast([("a", torch.zeros(1))], meta)
    assert sender.allowed_s == 90.0 + 512.0
    assert sender.open(3).broadcast_s(meta.nbytes) == sender.allowed_s


def test_a_broadcast_returns_the_seconds_of_its_sends(monkeypatch: pytest.MonkeyPatch) -> None:
    sender = Slow("", 60.0, 16)
    times = SimpleNamespace(perf_counter=lambda: sender.clock, monotonic=lambda: 0.0)
    monkeypatch.setattr(chunks, "time", times)
    weights = [(name, torch.zeros(4)) for name in "abc"]
    meta = WeightMeta(tuple("abc"), ("float32",) * 3, ((4,),) * 3, (4,) * 3)
    assert sender.broadcast(weights, meta) == 9.0
