"""A student engine's worker reports its weights: an extension of vLLM's worker.

    record_received ──► (transport) ──► model.load_weights ──► layers ──► packed by CPU kernels
                                          │ each tensor on its way           │ before it is packed
    received_digests ◄────────────────────┘                                  │
    loaded_digests ◄── the parameters as they are ◄──────────────────────────┘

Both kinds of transports give what they received to ``model.load_weights``: ``transports/engine.py``
and vLLM's own. An update that never reaches it has no digests.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

import torch

from async_opd.weight_sync.digests import Digests
from async_opd.weight_sync.parameters import PACKED
from rollouter.adapter_worker import AdapterWorker

EXTENSION = "rollouter.freshness_worker.FreshnessWorker"
"""vLLM's ``worker_extension_cls``."""


class FreshnessWorker(AdapterWorker):
    """vLLM adds it to the bases of its worker; ``on_workers`` calls its methods by name."""

    if TYPE_CHECKING:
        _weight_update_active: bool

        def finish_weight_update(self) -> None: ...

    def record_received(self) -> None:
        """Records the tensors of the next update, until ``received_digests``."""
        model = self.model_runner.get_model()
        if not hasattr(self, "_packed"):
            self._packed = Digests(torch)
            self._record_packing(model)
        load = type(model).load_weights
        self._received = received = Digests(torch)

        def recorded(weights: Iterable[tuple[str, torch.Tensor]], **options: Any) -> Any:
            return load(model, received.add_all(weights), **options)

        model.load_weights = recorded

    def end_update(self) -> None:
        """Ends an update that other workers did not receive, so that the next one can begin."""
        if self._weight_update_active:
            self.finish_weight_update()

    def received_digests(self) -> dict[str, str]:
        """Digests of the tensors that the loader was given since ``record_received``, by name.

        An adapter is loaded as it was received, after the update.
        """
        model = self.model_runner.get_model()
        model.__dict__.pop("load_weights", None)
        for name, tensor in self.weight_transfer_engine.adapter.items():
            self._received.add(name, tensor)
        return self._received.values()

    def loaded_digests(self) -> dict[str, str]:
        """Digests of the model's parameters, by name.

        vLLM's CPU kernels compute with packed copies of matrices, and leave some parameters empty:
        there, digests of what was packed last, with ``PACKED`` before the name. Of an engine that
        gets adapters, those of its LoRA layers: no sync changes its other parameters.
        """
        if self.weight_transfer_engine.adapter:
            return self.adapter_digests()
        digests = Digests(torch)
        for name, parameter in self.model_runner.get_model().named_parameters():
            if parameter.numel():
                digests.add(name, parameter)
        return digests.values() | self._packed.values()

    def _record_packing(self, model: Any) -> None:
        """Records from now on what the layers of a CPU engine give to their kernels."""
        for name, layer in model.named_modules():
            method: Any = getattr(layer, "quant_method", None)
            pack = getattr(method, "process_weights_after_loading", None)
            devices = {parameter.device.type for parameter in layer.parameters(recurse=False)}
            if pack is not None and devices == {"cpu"}:
                method.process_weights_after_loading = self._recorded(name, layer, pack)

    def _recorded(self, name: str, layer: Any, pack: Callable[[Any], Any]) -> Callable[[Any], Any]:
        def recorded(given: Any) -> Any:
            if given is layer:
                for part, parameter in layer.named_parameters(recurse=False):
                    if parameter.numel() and not parameter.is_meta:
                        self._packed.add(f"{PACKED}{name}.{part}", parameter)
            return pack(given)

        return recorded
