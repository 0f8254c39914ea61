"""Asks a model what its attention needs, by one pass of two tokens with an attention that records.

    model ──two tokens──► each layer's call, each mask's function ──► AttentionNeeds

Settings of a config are not enough: each family names windows, caps and sinks differently.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from async_opd.models.model_files import OF_ATTENTION
from trainer.student.attention import unknown_arguments
from trainer.student.attention_choice import AttentionNeeds, Platform
from trainer.vision.parts import set_attention_of

PROBE = "packed_probe"
LENGTHS = {"cu_seq_lens_q", "max_length_q"}
FLASH_ATTN = (2, 6)
"""First version of the package with a soft cap."""


def platform_of(device: torch.device, half: bool) -> Platform:
    """The abilities of the device, torch and the installed packages."""
    from torch.nn.attention.varlen import varlen_attn
    from transformers.utils import is_flash_attn_2_available

    known = inspect.signature(varlen_attn).parameters.keys()
    built = device.type != "cuda" or torch.backends.cuda.is_flash_attention_available()
    return Platform(
        device=device.type,
        capability=torch.cuda.get_device_capability(device) if device.type == "cuda" else (0, 0),
        half=half,
        varlen=built and {"scale", "window_size", "enable_gqa"} <= known,
        flash_attn=bool(is_flash_attn_2_available()) and _flash_attn_version() >= FLASH_ATTN,
    )


def _flash_attn_version() -> tuple[int, ...]:
    import flash_attn  # type: ignore[import-not-found]

    return tuple(int(part) for part in flash_attn.__version__.split(".")[:2])


def attention_needs(model: Any) -> AttentionNeeds:
    """The needs of the model's attention. Its attention implementation is ``PROBE`` afterwards.

    A model that fails without a mask, or does not call transformers' attention, has no ``layers``.
    """
    device = next(model.parameters()).device
    ids = torch.arange(2, device=device)[None]
    given = {"input_ids": ids, "position_ids": ids, "use_cache": False}
    lengths = {"cu_seq_lens_q": torch.tensor([0, 2], device=device), "max_length_q": 2}
    fault = ""
    for more in (lengths, {}):  # some take no further arguments
        record = _Record.registered()
        set_attention_of(model, PROBE)
        try:
            with torch.no_grad():
                model.base_model(**given, **more)
        except (TypeError, ValueError, AttributeError, NotImplementedError, RuntimeError) as error:
            fault = f"{type(error).__name__}: {error}"
            continue
        needs = record.needs(bool(model._supports_flex_attn))
        return replace(needs, other_layers=_other_layers(model))
    return AttentionNeeds(layers=0, lengths=False, head_dims=(0, 0), fault=fault)


def _other_layers(model: Any) -> frozenset[str]:
    kinds = getattr(model.config.get_text_config(), "layer_types", None) or ()
    return frozenset(kinds) - OF_ATTENTION


@dataclass
class _Record:
    """Calls of attention and of masks; each call's result is zeros."""

    calls: list[dict[str, Any]] = field(default_factory=list)
    head_dims: tuple[int, int] = (0, 0)
    windows: set[int | None] = field(default_factory=set)
    plain: bool = True

    @classmethod
    def registered(cls) -> _Record:
        """A new record, which ``PROBE`` is in transformers from now on."""
        from transformers import AttentionInterface
        from transformers.masking_utils import AttentionMaskInterface

        record = cls()
        AttentionInterface.register(PROBE, record.attend)
        AttentionMaskInterface.register(PROBE, record.mask)
        return record

    def attend(
        self,
        module: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: Any,
        **arguments: Any,
    ) -> tuple[torch.Tensor, None]:
        if arguments.get("is_causal") is None:
            arguments["is_causal"] = getattr(module, "is_causal", True)
        self.calls.append(arguments)
        widths = (query.shape[-1], value.shape[-1])
        self.head_dims = (max(self.head_dims[0], widths[0]), max(self.head_dims[1], widths[1]))
        return query.new_zeros((*query.transpose(1, 2).shape[:-1], widths[1])), None

    def mask(
        self,
        *,
        mask_function: Callable[..., torch.Tensor],
        local_size: int | None = None,
        use_vmap: bool = False,
        **_: Any,
    ) -> None:
        """Records the mask's window, and whether it is causal and nothing but this window."""
        self.windows.add(local_size)
        self.plain &= not use_vmap and _is_causal_window(mask_function, local_size)

    def needs(self, flex: bool) -> AttentionNeeds:
        named = {call.get("sliding_window") for call in self.calls}
        known = {"scaling", "dropout", "sliding_window", "softcap", *LENGTHS}
        others: set[str] = set()
        for call in self.calls:
            others |= unknown_arguments({k: v for k, v in call.items() if k not in known})
            others |= set() if call["is_causal"] else {"is_causal=False"}
        return AttentionNeeds(
            layers=len(self.calls),
            lengths=all(call.keys() >= LENGTHS for call in self.calls),
            head_dims=self.head_dims,
            windows_known=self.plain and self.windows == named,
            soft_cap=any(call.get("softcap") is not None for call in self.calls),
            others=frozenset(others),
            flex=flex,
        )


def _is_causal_window(function: Callable[..., torch.Tensor], window: int | None) -> bool:
    """Whether it shows a query itself and, of the tokens before, all or the ``window`` - 1 last."""
    count = 2 * (window or 8) + 3
    keys, zero = torch.arange(count), torch.tensor(0)
    for query in (zero, torch.tensor(count - 1)):
        expected = (keys <= query) & (keys > query - (window or count))
        if not torch.equal(function(zero, zero, query, keys).expand(count), expected):
            return False
    return True
