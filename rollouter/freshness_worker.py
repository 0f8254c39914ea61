"""Extensions of vLLM's worker: it reports its weights, and loads the adapter of low rank.

    record_received ──► ChunkEngine ──► model.load_weights ──► layers ──► packed by CPU kernels
                          │ each tensor on its way                        │ before it is packed
    received_digests ◄────┘                                               │
    loaded_digests ◄── the parameters as they are ◄───────────────────────┘

A tensor that the model's loader never asks for has no digest.

    ChunkEngine.adapter ──load_adapter──► slots of vLLM's LoRA layers ──adapter_digests──► proof
    (A and s · B as they came)            (the engine computes with these)

There is one adapter, which each sync replaces: requests in flight go on with the new one, as they
go on with new weights. A sync that ends makes vLLM drop all adapters
(``LoRAModelRunnerMixin.reset_lora_state``): the new one is loaded after that.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors.torch import save_file

from async_opd.processes.engine_workers import FaultReturningWorker
from async_opd.weight_sync.digests import Digests
from async_opd.weight_sync.layout import experts_apart
from async_opd.weight_sync.parameters import PACKED

EXTENSION = "rollouter.freshness_worker.FreshnessWorker"
"""vLLM's ``worker_extension_cls``."""
WEIGHTS = "model.safetensors"
ADAPTER_ID = 1
Named = tuple[str, torch.Tensor]
torch.cpu._init_amx()  # vLLM uses AMX in bfloat16 without asking the kernel for it: SIGILL


class AdapterWorker(FaultReturningWorker):
    """``on_workers`` calls its methods by name, in engines with ``enable_lora``."""

    if TYPE_CHECKING:
        model_runner: Any
        weight_transfer_engine: Any

    def load_adapter(self) -> None:
        """Loads the adapter that was received last; before the first one, an adapter of zeros.

        ValueError if the engine has no LoRA layer for one of its tensors: vLLM would ignore it.
        """
        from vllm.lora.lora_model import LoRAModel
        from vllm.lora.peft_helper import PEFTHelper

        manager = self._manager
        tensors: Mapping[str, torch.Tensor] = self.weight_transfer_engine.adapter
        rank = next((len(t) for name, t in tensors.items() if ".lora_A." in name), 1)
        lora = manager.create_dummy_lora(ADAPTER_ID, rank, manager.model.embedding_modules)
        if tensors:
            lora = LoRAModel.from_lora_tensors(
                ADAPTER_ID,
                dict(tensors),
                PEFTHelper(r=rank, lora_alpha=rank, target_modules=[]),  # s is in B already
                device="cpu",
                dtype=manager.lora_config.lora_dtype,
                weights_mapper=self._renaming,
            )
            if unknown := sorted(lora.loras.keys() - self._slots.keys()):
                raise ValueError(f"the engine has no LoRA layer for {', '.join(unknown[:3])}")
        manager.remove_adapter(ADAPTER_ID)
        manager.add_adapter(lora)
        manager.activate_adapter(ADAPTER_ID)

    def adapter_digests(self) -> dict[str, str]:
        """Digests of what the LoRA layers compute with, under the names of the sent tensors."""
        from vllm.lora.utils import parse_fine_tuned_lora_name

        digests, manager = Digests(torch), self._manager
        if ADAPTER_ID not in manager.lora_index_to_id:
            return {}
        slot = manager.lora_index_to_id.index(ADAPTER_ID)
        for name, sent in self.weight_transfer_engine.adapter.items():
            layer, is_a = parse_fine_tuned_lora_name(name, self._renaming)
            module, index = self._slots[layer]
            stacked = module.lora_a_stacked if is_a else module.lora_b_stacked
            rows, columns = sent.shape
            digests.add(name, stacked[index][slot, 0, :rows, :columns])
        return digests.values()

    @property
    def _manager(self) -> Any:
        return self.model_runner.lora_manager._adapter_manager

    @property
    def _renaming(self) -> Any:
        """vLLM's names of the checkpoint's modules, if they are others."""
        mapper = getattr(self._manager.model, "hf_to_vllm_mapper", None)
        return None if mapper is None else mapper.get_rename_mapper()

    @property
    def _slots(self) -> dict[str, tuple[Any, int]]:
        """The LoRA layer of each module, and which of its slices: vLLM joins q, k and v."""
        manager = self._manager
        return {
            part: (module, index)
            for name, module in manager.modules.items()
            for index, part in enumerate(manager.packed_modules.get(name, [name]))
        }


class FreshnessWorker(AdapterWorker):
    """vLLM adds it to the bases of its worker; ``on_workers`` calls its methods by name."""

    if TYPE_CHECKING:
        _weight_update_active: bool
        rank: int

        def finish_weight_update(self) -> None: ...

    def record_received(self, keeps: bool = False) -> None:
        """Records the tensors of the next update, until ``received_digests``.

        With ``keeps`` the first worker has a copy of them in host memory until the next update.
        """
        if not hasattr(self, "_packed"):
            self._packed = Digests(torch)
            self._record_packing(self.model_runner.get_model())
        self._received = received = Digests(torch)

        def passing(weights: Iterator[Named]) -> Iterator[Named]:
            recorded = received.add_all(weights)
            return self._copied(recorded) if keeps and self.rank == 0 else recorded

        self.weight_transfer_engine.passing = passing

    def _copied(self, weights: Iterator[Named]) -> Iterator[Named]:
        """Yields the tensors, and copies each into the memory of that of the update before.

        It is pinned where they come from a GPU. RuntimeError if the host has too little.
        """
        if not hasattr(self, "_kept"):
            self._kept: dict[str, torch.Tensor] = {}
        for name, tensor in weights:
            if name not in self._kept:
                try:
                    self._kept[name] = torch.empty(
                        tensor.shape, dtype=tensor.dtype, pin_memory=tensor.is_cuda
                    )
                except (MemoryError, RuntimeError) as error:
                    so_far = sum(one.nbytes for one in self._kept.values()) >> 20
                    raise RuntimeError(
                        f"no host memory for the copy of the weights ({name}, {tensor.nbytes} "
                        f"bytes, after {so_far} MiB: {error}): "
                        "set cluster.trainer_recovery: checkpoint"
                    ) from error
            self._kept[name].copy_(tensor)
            yield name, tensor

    def write_kept(self, directory: str, sent: dict[str, str]) -> list[str]:
        """Writes the copy as a model's weights to a new directory, if its digests are those sent.

        Returns the names of the tensors whose digests are others, or that it has not: nothing is
        written then. An update that broke off leaves tensors of two versions.
        """
        digests, kept = Digests(torch), getattr(self, "_kept", {})
        for name, tensor in kept.items():
            digests.add(name, tensor)
        others = sorted({name for name, _ in digests.values().items() ^ sent.items()})
        if not others:
            folder = Path(directory)
            folder.mkdir()
            named = dict(experts_apart(kept.items()))
            save_file(named, folder / WEIGHTS, metadata={"format": "pt"})
        return others

    def end_update(self) -> None:
        """Ends an update that other workers did not receive, so that the next one can begin."""
        if self._weight_update_active:
            self.finish_weight_update()

    def received_digests(self) -> dict[str, str]:
        """Digests of the tensors that the loader was given since ``record_received``, by name.

        An adapter is loaded as it was received, after the update.
        """
        self.weight_transfer_engine.passing = iter
        for name, tensor in self.weight_transfer_engine.adapter.items():
            self._received.add(name, tensor)
        return self._received.values()

    def loaded_digests(self) -> dict[str, str]:
        """Digests of the model's parameters, by name.

        vLLM's CPU kernels compute with packed copies of matrices, and leave some parameters empty:
        there, digests of what was packed last, with ``PACKED`` before the name. Quantized matrices
        are kept by columns: their digests are those of their rows. Of an engine that
        gets adapters, those of its LoRA layers: no sync changes its other parameters.
        """
        if self.weight_transfer_engine.adapter:
            return self.adapter_digests()
        digests = Digests(torch)
        for name, parameter in self.model_runner.get_model().named_parameters():
            if parameter.numel():
                rows = parameter.t() if parameter.ndim == 2 else parameter
                by_columns = rows.is_contiguous() and not parameter.is_contiguous()
                digests.add(name, rows if by_columns else parameter)
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
