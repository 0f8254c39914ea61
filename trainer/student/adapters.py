"""Adapters of low rank (LoRA): peft puts them into the student, whose own weights are frozen.

    add_adapters   q_proj ──► q_proj.base_layer · q_proj.lora_A.default · q_proj.lora_B.default
    plain_state    the weights without adapters, W + s · B A in place of W: weight sync, export
    adapter_state  A and s · B under PEFT's names: weight sync to engines that apply them

A merged matrix is computed from the frozen one each time, and written nowhere: no rounding adds up
over syncs.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from async_opd.core.errors import StageError
from async_opd.files.safe_open import FOLDER_MODE
from async_opd.models.json_files import hub_id
from async_opd.weight_sync.layout import PEFT_PREFIX
from trainer.saving.state import Tensors, model_state
from trainer.student.sharding import full_tensor, is_sharded
from trainer.vision.parts import language_model

if TYPE_CHECKING:
    from async_opd.config.sections.train import LoraConfig

ADAPTER = "default"
"""peft's name of the adapter."""
BASE, LORA = ".base_layer.", ".lora_"
"""Infixes of peft in the names of frozen and of trained tensors."""


def add_adapters(model: Any, lora: LoraConfig) -> None:
    """Adds adapters to the linear layers that ``lora`` names; all other weights are frozen.

    B is 0, A is drawn from torch's generator. StageError if a name fits no layer, or the head.
    """
    from peft import LoraConfig as PeftConfig
    from peft import inject_adapter_in_model

    names = _adapted_layers(model, lora)
    settings = PeftConfig(
        r=lora.rank, lora_alpha=lora.alpha, use_rslora=lora.use_rslora, target_modules=names
    )
    inject_adapter_in_model(settings, model)
    for layer in model.modules():
        if ADAPTER in getattr(layer, "lora_A", ()) and layer.lora_A[ADAPTER].weight.is_meta:
            for part in (layer.lora_A, layer.lora_B):  # peft puts them where the frozen weight is
                part[ADAPTER].to_empty(device="cpu")
            layer.reset_lora_parameters(ADAPTER, init_lora_weights=True)


def halve_frozen(model: Any) -> None:
    """Converts frozen matrices to bfloat16; vectors, and all that is trained, stay float32."""
    for parameter in model.parameters():
        if not parameter.requires_grad and parameter.ndim >= 2:
            parameter.data = parameter.data.to(torch.bfloat16)


def _adapted_layers(model: Any, lora: LoraConfig) -> list[str]:
    """The full names of the linear layers that get an adapter."""
    head, inside = model.get_output_embeddings(), set(language_model(model).modules())
    named = [
        (n, m) for n, m in model.named_modules() if type(m) is torch.nn.Linear and m is not head
    ]
    layers = [name for name, module in named if module in inside]
    names = lora.adapted(layers, any(n.endswith(".experts") for n, _ in model.named_modules()))
    known = {name.rpartition(".")[2] for name in layers}
    wrong = [] if lora.targets == "all-linear" else sorted(set(lora.targets) - known)
    if wrong or not names:
        raise StageError(
            "trainer",
            f"{type(model).__name__} has no linear layer {', '.join(wrong) or 'at all'} that can "
            "have an adapter",
            f"train.lora.targets: all-linear, or some of {', '.join(sorted(known))}",
        )
    return names


def plain_state(model: Any) -> Iterator[tuple[str, torch.Tensor]]:
    """``model_state`` of the student without adapters, with W + s · B A in place of W.

    The sum is computed in float32, one matrix at a time; of a sharded student it is a shard of it,
    for which every rank gathers A.
    """
    layers = dict(model.named_modules())
    for name, tensor in model_state(model):
        owner, base, kind = name.rpartition(BASE)
        if LORA in name:
            continue
        if base and kind == "weight":
            tensor = torch.nn.Parameter(_merged(layers[owner]), requires_grad=False)
        yield f"{owner}.{kind}" if base else name, tensor


def _merged(layer: Any) -> torch.Tensor:
    """W + s · B A of a layer, float32. B is sharded by rows as W is."""
    frozen = layer.base_layer.weight.detach()
    left = layer.lora_B[ADAPTER].weight.detach()
    right = full_tensor(layer.lora_A[ADAPTER].weight.detach()).float()
    rows, own = (t.to_local() if is_sharded(t) else t for t in (left, frozen))
    merged = torch.addmm(own.float(), rows.float(), right, alpha=layer.scaling[ADAPTER])
    if not is_sharded(frozen):
        return merged
    from torch.distributed.tensor import DTensor

    sharded: Any = frozen
    return DTensor.from_local(
        merged,
        sharded.device_mesh,
        sharded.placements,
        run_check=False,
        shape=frozen.shape,
        stride=frozen.stride(),
    )


def adapter_parameters(model: Any) -> Iterator[tuple[str, torch.Tensor]]:
    """The adapters by parameter name; nothing if there are none."""
    yield from ((name, p) for name, p in model.named_parameters() if LORA in name)


def adapter_state(model: Any) -> Iterator[tuple[str, torch.Tensor]]:
    """A and s · B of each adapter under PEFT's names: with ``alpha`` equal to ``rank`` s is 1."""
    layers = dict(model.named_modules())
    for name, tensor in model.named_parameters():
        if LORA in name:
            owner, _, kind = name.rpartition(LORA)
            scale = layers[owner].scaling[ADAPTER] if kind.startswith("B") else 1.0
            scaled = torch.nn.Parameter(tensor.detach() * scale, requires_grad=False)
            yield PEFT_PREFIX + name.replace(f".{ADAPTER}.", "."), scaled


def write_adapter(model: Any, source: str, tensors: Tensors, folder: Path) -> None:
    """Writes a PEFT directory: the adapters' own tensors, by parameter name, and their config.

    ``source`` is the model that they adapt: its id is written, or of a directory its name, because
    the adapter is published; ``./`` keeps the name from being that of a model of a hub.
    """
    from safetensors.torch import save_file

    settings = next(iter(model.peft_config.values()))
    settings.base_model_name_or_path, settings.revision = hub_id(source) or (
        f"./{Path(source).name}",
        None,
    )
    settings.task_type, settings.inference_mode = "CAUSAL_LM", True
    folder.mkdir(mode=FOLDER_MODE)
    settings.save_pretrained(folder)
    named = {
        PEFT_PREFIX + name.replace(f".{ADAPTER}.", "."): tensor.contiguous()
        for name, tensor in tensors.items()
    }
    save_file(named, folder / "adapter_model.safetensors", metadata={"format": "pt"})
