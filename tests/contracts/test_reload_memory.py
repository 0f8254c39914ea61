"""The peak of vLLM's layer-wise reload, counted tensor by tensor, against the plan of it.

A CPU stands for the GPU: vLLM's models take weights from ``ChunkEngine`` as there, chunk by chunk.
"""

from __future__ import annotations

import weakref
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

from async_opd.memory.pools import reload_bytes
from async_opd.models.model_size import ModelSize
from async_opd.weight_sync.layout import Rendezvous, WeightMeta, chunk_plan
from benchmarks.expert_sync import of_vllm
from rollouter.transports import chunks
from tests.contracts import contract
from tests.trainer.processes import spread

pytestmark = pytest.mark.slow  # imports vllm

CHUNK = 1 << 20
ITEMSIZE = 4
SHAPE: dict[str, Any] = {
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "max_position_embeddings": 64,
    "tie_word_embeddings": False,
}
EXPERTS = {"num_experts": 16, "moe_intermediate_size": 128, "num_experts_per_tok": 2}


class Counted(TorchDispatchMode):
    """Bytes of all memory that operations made and that is still there: now, and most."""

    def __init__(self) -> None:
        super().__init__()
        self.now = self.peak = 0
        self.alive: dict[int, int] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for tensor in tree_iter(out):
            if isinstance(tensor, torch.Tensor) and tensor.device.type == "cpu":
                self.count(tensor)
        return out

    def count(self, tensor: torch.Tensor) -> None:
        storage = tensor.untyped_storage()
        if storage._cdata in self.alive:
            return
        self.alive[storage._cdata] = storage.nbytes()
        self.now += storage.nbytes()
        self.peak = max(self.peak, self.now)
        weakref.finalize(storage, self.freed, storage._cdata)

    def freed(self, storage: int) -> None:
        self.now -= self.alive.pop(storage)


class Sent(chunks.Receiver):
    """The chunks of weights, each in a buffer that is made when it is received."""

    def __init__(self, weights: list[torch.Tensor], meta: WeightMeta) -> None:
        every = [one.detach().contiguous().view(-1).view(torch.uint8) for one in weights]
        self.chunks = [torch.cat([every[i] for i in c]) for c in chunk_plan(meta.sizes, CHUNK)]

    def receive(self, nbytes: int, timeout_s: float) -> torch.Tensor:
        return torch.empty(nbytes, dtype=torch.uint8).copy_(self.chunks.pop(0))

    def close(self) -> None: ...


def reload_peak(student: Any, folder: str, _: int) -> torch.Tensor:
    """Bytes beside vLLM's model, at the peak of a load of the student's weights."""
    from vllm.config import set_current_vllm_config
    from vllm.model_executor.model_loader.reload import finalize_layerwise_reload

    from rollouter.transports.engine import ChunkEngine, ChunkUpdateInfo
    from trainer.student.named_weights import named_weights

    config, model = of_vllm(Path(folder))
    weights = dict(named_weights(student, torch.float32, changing=True))
    shapes = tuple(tuple(one.shape) for one in weights.values())
    kinds = ("float32",) * len(weights)
    meta = WeightMeta(tuple(weights), kinds, shapes, (ITEMSIZE,) * len(weights))
    parallel = SimpleNamespace(data_parallel_index=0, world_size=1, rank=0)
    owner: Any = SimpleNamespace(parallel_config=parallel, model_config=config.model_config)
    engine = ChunkEngine(owner, owner, torch.device("cuda"), model)
    engine._receiver = Sent(list(weights.values()), meta)
    engine._at = Rendezvous("", 0, 2, 60.0, CHUNK, b"")
    sent = ChunkUpdateInfo(list(meta.names), list(kinds), [list(shape) for shape in shapes])
    with set_current_vllm_config(config), Counted() as counted:
        for parameter in model.parameters():
            counted.count(parameter.data)
        before = counted.now
        engine.receive_weights(sent)
        finalize_layerwise_reload(model, config.model_config)
    return torch.tensor(counted.peak - before)


@pytest.mark.parametrize(
    ("family", "settings", "least"),
    [
        ("Qwen3", {"vocab_size": 20_480}, 0.98),
        ("Qwen3", {"vocab_size": 20_480, "tie_word_embeddings": True}, 0.98),
        ("Qwen3", {"vocab_size": 20_500}, 0.98),  # which vLLM pads
        ("Qwen3", {"vocab_size": 1_024}, 0.98),  # the largest module is a layer's
        ("Qwen3Moe", {"vocab_size": 1_024, **EXPERTS}, 0.63),  # a CPU's kernels need no other form
    ],
)
def test_a_load_takes_what_is_planned_for_it(
    family: str, settings: dict[str, Any], least: float, tmp_path: Path
) -> None:
    import transformers

    config = getattr(transformers, f"{family}Config")(**SHAPE | settings)
    student = getattr(transformers, f"{family}ForCausalLM")(config)
    student.save_pretrained(tmp_path / "model")
    (tmp_path / "ranks").mkdir()
    work = partial(reload_peak, student, str(tmp_path / "model"))
    (found,) = spread(1, work, tmp_path / "ranks", timeout_s=600)
    planned = reload_bytes(ModelSize.read(tmp_path / "model"), ITEMSIZE, 1, CHUNK)
    with contract(
        "vllm.model_executor.model_loader.reload.layerwise",
        "keeps of a module what it was given, makes it again once, and forgets it then",
        by="async_opd.memory.pools",
    ):
        assert least <= int(found) / planned <= 1.01
