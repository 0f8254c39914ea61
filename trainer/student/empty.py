"""A student on ``meta``: it takes no memory until each rank reads its own parts of the weights.

config.json ──modules on meta──► (shard) ──fill──► this rank's parts
                    └──copy────────────────whole──► one that gathers a block at a time
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from async_opd.core.errors import StageError
from async_opd.core.stages import TRAINER
from async_opd.models.unasked import without_hub
from trainer.student.rotary import pin_rotary
from trainer.student.sharding import blocks_of, full_tensor, is_sharded
from trainer.student.stored_weights import StoredWeights


class EmptyStudent:
    """A causal language model, which may see, without its weights, in float32 and eval mode."""

    def __init__(
        self, directory: Path, max_model_len: int | None = None, trust_remote_code: bool = False
    ) -> None:
        """Reads no weight. StageError, with names, if the files do not hold those of the model.

        ``max_model_len``: the engines', for rotary factors (``trainer.student.rotary``).
        """
        self.model = _on_meta(directory, trust_remote_code)
        self._copy = copy.deepcopy(self.model)
        self._weights = StoredWeights(self.model, directory)
        self._max_model_len = max_model_len
        self._device = torch.device("meta")

    def fill(self, device: torch.device, home: torch.device | None = None) -> None:
        """Reads this rank's parts: those of ``from_pretrained``, bit by bit, in the model's dtype.

        Rotary factors are the engines' afterwards. ``home``: the parameters' device if it is not
        the one that computes.
        """
        self._weights.fill(device, home)
        self._device = device
        if not self._sharded:
            self.model.to(device)  # what has not been on meta, such as adapters
        pin_rotary(self.model, self._max_model_len)

    def whole(self) -> Any:
        """The filled student with full weights in float32, for passes without gradients.

        Of a sharded student it is a copy, in which a block has its weights only while it computes,
        all else as long as the copy is used. All ranks call it and run the same passes. It has no
        adapters: those of a new student change nothing.
        """
        if not self._sharded:
            return self.model
        whole = copy.deepcopy(self._copy)
        outside = dict(whole.named_modules())
        blocks = {id(block) for block in blocks_of(whole)}
        for name, block in whole.named_modules():
            if id(block) in blocks and name in outside:
                inside = dict(block.named_modules(prefix=name))
                outside = {key: one for key, one in outside.items() if key not in inside}
                self._gather_within(inside, block)
        self._gather(outside)
        for name, module in whole.named_modules():
            for key in module._buffers:
                module._buffers[key] = self._weights.tensor(_joined(name, key))
        pin_rotary(whole, self._max_model_len)
        return whole

    @property
    def _sharded(self) -> bool:
        return any(map(is_sharded, self.model.parameters()))

    def _gather_within(self, modules: dict[str, Any], block: torch.nn.Module) -> None:
        """Gives the modules, which are those of a block, their weights while it computes."""
        empty = [(module, dict(module._parameters)) for module in modules.values()]

        def gather(*_: Any) -> None:
            self._gather(modules)

        def free(*_: Any) -> None:
            for module, parameters in empty:
                module._parameters.update(parameters)

        block.register_forward_pre_hook(gather)
        block.register_forward_hook(free, always_call=True)

    def _gather(self, modules: dict[str, Any]) -> None:
        """Gives the modules their weights. A collective, in the order of the modules."""
        gathered: dict[int, torch.nn.Parameter] = {}
        for name, module in modules.items():
            for key, tensor in _own(module):
                own = self._weights.tensor(_joined(name, key))
                if id(own) not in gathered:
                    whole = full_tensor(own.detach()).to(self._device, tensor.dtype)
                    gathered[id(own)] = torch.nn.Parameter(whole, requires_grad=False)
                module._parameters[key] = gathered[id(own)]


def _on_meta(directory: Path, trust_remote_code: bool) -> Any:
    """The model of a directory's config.json in float32 and eval mode, all of it on ``meta``.

    StageError if transformers makes no model of it, or it is not a directory: the name would be
    that of a model of the hub.
    """
    if not directory.is_absolute() or not directory.is_dir():
        cause = f"student.model: no such directory: {directory}"
        raise StageError(TRAINER, cause, "check the path")
    try:
        with without_hub(trust_remote_code):
            return _made(directory, trust_remote_code)
    except Exception as error:  # transformers raises what its classes raise
        shown = f"{type(error).__name__}: {error}".partition("\n")[0][:300]
        cause = f"student.model: transformers makes no model of {directory}/config.json: {shown}"
        remedy = "take a model of a family that transformers has, as its authors saved it"
        raise StageError(TRAINER, cause, remedy) from error


def _made(directory: Path, trust_remote_code: bool) -> Any:
    from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText

    trust = {"trust_remote_code": trust_remote_code}
    settings = AutoConfig.from_pretrained(directory, **trust)
    # A config.json may name a kernel, which transformers would download and run.
    settings._attn_implementation = None
    vision = getattr(settings, "vision_config", None) is not None
    kind = AutoModelForImageTextToText if vision else AutoModelForCausalLM
    with torch.device("meta"):
        model = kind.from_config(settings, dtype=torch.float32, **trust)
    return model.eval()


def _own(module: Any) -> Iterator[tuple[str, torch.Tensor]]:
    """The module's own parameters, without those of its parts."""
    yield from ((key, one) for key, one in list(module._parameters.items()) if one is not None)


def _joined(module: str, name: str) -> str:
    return f"{module}.{name}" if module else name
