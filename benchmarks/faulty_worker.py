"""The worker of a student engine in which updates go wrong on demand; see benchmarks.freshness."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any
from unittest import mock

from rollouter.freshness_worker import AdapterWorker, FreshnessWorker

WORKER = "benchmarks.faulty_worker.FaultyWorker"
Named = Iterator[tuple[str, Any]]
Change = Callable[[str, Any, Any], Any]
"""Name, tensor and first value of a weight: what the loader takes for it; None: it skips it."""


def first_values(part: str) -> Change:
    """The loader leaves weights of a kind at the values that the engine started with."""
    return lambda name, weight, first: first if part in name else weight


CHANGES: dict[str, Change] = {
    "one shard of two": first_values("layers.1.mlp.up_proj"),
    "ignored update": lambda name, weight, first: None,
    "norm left out": first_values("layers.0.post_attention_layernorm"),
    "bias left out": first_values("layers.1.self_attn.v_proj.bias"),
    "one stale expert": first_values("layers.1.mlp.experts.2.up_proj"),
    "scaled matrix": lambda name, w, first: w * 1.25 if "0.self_attn.o_proj" in name else w,
}
"""Faults of the engine's loader, below the place where tensors are recorded."""


QuantizedChange = Callable[[Any, Any, Any, Any], tuple[Any, Any]]
"""Numbers and scales, and those before the sync: what the engine computes with instead."""
QUANTIZED: dict[str, QuantizedChange] = {
    "wrong scale": lambda new, scale, old, old_scale: (new, scale * 1.25),
    "stale scale": lambda new, scale, old, old_scale: (new, old_scale),
    "layer not quantized again": lambda new, scale, old, old_scale: (old, old_scale),
    "blocks in another order": lambda new, scale, old, old_scale: (
        new.roll(len(scale) // 2, 1),  # kept by columns
        scale.roll(len(scale) // 2, 0),
    ),
}
"""Faults of the engine's quantization, in one layer; the weights that it was sent are right."""
LAYER = "model.layers.1.mlp.gate_up_proj"


NONE = "none"
"""No fault."""
TRAINERS = ("dropped tensor", "two swapped", "old snapshot", "wrong dtype")
"""Faults of the trainer's end, in ``benchmarks.freshness``."""


def stale_head(engine: Any) -> None:
    """ChunkEngine.finish_weight_update without packing the head again."""
    from vllm.model_executor.model_loader.reload import finalize_layerwise_reload

    finalize_layerwise_reload(engine.model, engine.model_config)


def truncated(receive: Callable[..., Any]) -> Callable[..., Any]:
    """Of each chunk the last quarter does not arrive."""

    def faulty(receiver: Any, nbytes: int, timeout_s: float) -> Any:
        chunk = receive(receiver, nbytes, timeout_s)
        chunk[nbytes * 3 // 4 :] = 0
        return chunk

    return faulty


def thrown_away(receive: Any) -> Any:
    """ChunkEngine.receive_weights that takes part in the transfer and loads nothing."""

    def faulty(engine: Any, update: Any) -> None:
        with mock.patch.object(engine.model, "load_weights", lambda weights: set(weights)):
            receive(engine, update)

    return faulty


ADAPTER_FAULTS: dict[str, Callable[[dict[str, Any], dict[str, Any]], dict[str, Any]]] = {
    "adapter ignored": lambda new, old: old,
    "adapter dropped": lambda new, old: {},
    "adapter without a layer": lambda new, old: {n: t for n, t in new.items() if "1.mlp" not in n},
    "adapter scaled": lambda new, old: {n: t * 1.5 if "lora_B" in n else t for n, t in new.items()},
}
"""The weights that are loaded in place of a new adapter."""


def loading(change: Callable[[dict[str, Any], dict[str, Any]], dict[str, Any]], old: Any) -> Any:
    """AdapterWorker.load_adapter that loads something else than was received."""
    load = AdapterWorker.load_adapter

    def faulty(worker: Any) -> None:
        engine = worker.weight_transfer_engine
        given, engine.adapter = engine.adapter, change(dict(engine.adapter), old)
        try:
            load(worker)
        finally:
            engine.adapter = given

    return faulty


def quantizing(change: QuantizedChange, model: Any) -> Any:
    """ChunkEngine.finish_weight_update after which one layer is not what was quantized."""
    from rollouter.transports.engine import ChunkEngine

    layer = model.get_submodule(LAYER)
    before, finish = (
        [layer.weight.clone(), layer.weight_scale.clone()],
        ChunkEngine.finish_weight_update,
    )

    def faulty(engine: Any) -> None:
        finish(engine)
        made = change(layer.weight.clone(), layer.weight_scale.clone(), *before)
        for parameter, wrong in zip((layer.weight, layer.weight_scale), made, strict=True):
            parameter.data.copy_(wrong)

    return faulty


class FaultyWorker(FreshnessWorker):
    """``on_workers`` begins and ends a fault."""

    def begin_fault(self, name: str) -> None:
        """Updates go wrong from now on."""
        from rollouter.transports.engine import ChunkEngine
        from rollouter.transports.gloo import GlooReceiver

        self._fault = ExitStack()
        if name in TRAINERS or name == NONE:
            return
        if name in CHANGES:
            model = type(self.model_runner.get_model())
            self._patch(model, "load_weights", self._faulty_loader(model, CHANGES[name]))
        elif name in ADAPTER_FAULTS:
            given = dict(self.weight_transfer_engine.adapter)
            self._patch(AdapterWorker, "load_adapter", loading(ADAPTER_FAULTS[name], given))
        elif name in QUANTIZED:
            faulty = quantizing(QUANTIZED[name], self.model_runner.get_model())
            self._patch(ChunkEngine, "finish_weight_update", faulty)
        elif name == "stale tied head":
            self._patch(ChunkEngine, "finish_weight_update", stale_head)
        elif name == "truncated chunk":
            self._patch(GlooReceiver, "receive", truncated(GlooReceiver.receive))
        elif name == "false version":
            self._patch(ChunkEngine, "receive_weights", thrown_away(ChunkEngine.receive_weights))
        else:
            raise ValueError(f"no fault {name!r} in the worker")

    def end_fault(self) -> None:
        """Updates are right again."""
        self._fault.close()

    def _patch(self, owner: Any, name: str, value: Any) -> None:
        self._fault.enter_context(mock.patch.object(owner, name, value))

    def _faulty_loader(self, model: Any, change: Change) -> Any:
        from safetensors.torch import load_file

        path = Path(self.model_runner.model_config.model) / "model.safetensors"
        first, load = load_file(path), model.load_weights

        def faulty(self: Any, weights: Named) -> Any:
            given = list(weights)
            changed = [(n, change(n, w, first[n].to(w.dtype))) for n, w in given]
            return load(self, iter([(n, w) for n, w in changed if w is not None]))

        return faulty
