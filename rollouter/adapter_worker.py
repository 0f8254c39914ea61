"""The adapter of low rank in an engine's worker: an extension of vLLM's worker.

    ChunkEngine.adapter ──load_adapter──► slots of vLLM's LoRA layers ──adapter_digests──► proof
    (A and s · B as they came)            (the engine computes with these)

There is one adapter, which each sync replaces: requests in flight go on with the new one, as they
go on with new weights. A sync that ends makes vLLM drop all adapters
(``LoRAModelRunnerMixin.reset_lora_state``): the new one is loaded after that.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch

from async_opd.processes.engine_workers import FaultReturningWorker
from async_opd.weight_sync.digests import Digests

ADAPTER_ID = 1
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
