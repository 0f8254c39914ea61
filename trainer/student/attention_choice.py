"""Chooses what computes the student's attention: a function of settings, device and model.

    varlen ──cannot──► flash ──cannot──► flex ──cannot──► StageError with all reasons   (on a GPU)
    sdpa of one sequence after the other ──cannot──► sdpa of whole rows                 (on a CPU)

On a GPU no choice but ``sdpa``, which the user has to name, makes a mask of a whole packed row, T²
entries for each layer: 512 MiB at 16,384 tokens. A CPU has sdpa only: torch's other kernels have no
backward pass there.

A model is asked what its attention needs, by one pass of two tokens with an attention that records:

    model ──two tokens──► each layer's call, each mask's function ──► AttentionNeeds

Settings of a config are not enough: each family names windows, caps and sinks differently.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import torch

from async_opd.core.errors import StageError
from async_opd.models.model_files import OF_ATTENTION
from trainer.student.attention import unknown_arguments
from trainer.vision.parts import set_attention_of

Kind = Literal["varlen", "flash", "flex", "sdpa"]
Attention = Literal["auto", "varlen", "flash", "flex", "sdpa"]
AUTO_ON_GPU: tuple[Kind, ...] = ("varlen", "flash", "flex")
"""In order of preference. varlen and flash are the same algorithm: varlen comes with torch, flash
also knows soft caps. flex is slower, compiles itself, and knows sinks."""

MAX_HEAD_DIM, HEAD_DIM_STEP, MIN_FLEX_HEAD_DIM = 256, 8, 16
FLEX_KNOWS = frozenset({"s_aux", "position_bias"})
"""Arguments of transformers' attention interface that its flex attention computes with."""

NO_CALLS = "the model does not call transformers' attention interface"
DENSE = "train.attention: sdpa makes a mask of each whole packed row, T² entries for each layer"


@dataclass(frozen=True)
class Platform:
    """Where the student trains.

    ``capability``: CUDA's compute capability. ``half``: attention is computed in 16 bits.
    ``varlen`` and ``flash_attn``: torch, and the package flash-attn, have functions for ragged rows
    with all arguments that are used.
    """

    device: str
    capability: tuple[int, int] = (0, 0)
    half: bool = False
    varlen: bool = False
    flash_attn: bool = False


@dataclass(frozen=True)
class AttentionNeeds:
    """The requests of a model to its attention, over all layers.

    ``layers``: calls of transformers' attention interface. ``lengths``: keyword arguments of the
    decoder reach every call. ``head_dims``: widths of queries and of values. ``windows_known``: the
    masks are causal, and every window of a mask is named in calls too. ``soft_cap``: scores are
    capped. ``others``: further arguments that change the result. ``flex``: transformers has
    flex attention for the model. ``other_layers``: kinds of layers that are not attention, as its
    config names them. ``fault``: why the model could not be asked.
    """

    layers: int
    lengths: bool
    head_dims: tuple[int, int]
    windows_known: bool = True
    soft_cap: bool = False
    others: frozenset[str] = frozenset()
    flex: bool = True
    other_layers: frozenset[str] = frozenset()
    fault: str = ""


def choose_attention(
    wanted: Attention, platform: Platform, needs: AttentionNeeds, across: bool = False
) -> Kind:
    """The kind of attention. StageError, with reasons, if there is none for ``wanted``.

    ``across``: ranks share each row, so that it computes some heads of all of their tokens.
    """
    gpu = platform.device == "cuda"
    if wanted == "auto" and not gpu and not across:
        return "sdpa"
    of_device: tuple[Kind, ...] = AUTO_ON_GPU if gpu else ("sdpa",)
    candidates = of_device if wanted == "auto" else (wanted,)
    reasons = {kind: "; ".join(_faults(kind, platform, needs, across)) for kind in candidates}
    for kind, reason in reasons.items():
        if not reason:
            return kind
    cause = ". ".join(f"{kind}: {reason}" for kind, reason in reasons.items())
    remedy = "choose another student.model" if wanted == "auto" else "set train.attention: auto"
    if across:
        cause, remedy = f"shared by ranks: {cause}", f"set train.context_parallel: 1, or {remedy}"
    raise StageError(
        "trainer",
        f"no attention for packed rows of this student, {cause}",
        f"{remedy}; {DENSE}" if gpu and not across else remedy,
    )


def sequences_apart(needs: AttentionNeeds) -> bool:
    """Whether a function that gets each sequence by itself, and no mask, computes the attention."""
    return needs.layers > 0 and not any(_faults_of_calls(needs))


def _faults(kind: Kind, platform: Platform, needs: AttentionNeeds, across: bool) -> Iterator[str]:
    """Why this kind cannot compute what the model needs."""
    if across:
        yield from _faults_across_ranks(kind, needs)
    if kind == "sdpa":
        return
    if platform.device != "cuda":
        yield "it trains on GPUs only"
    if not needs.layers:
        yield needs.fault or NO_CALLS
    elif kind == "flex":
        yield from _flex_faults(needs)
    else:
        yield from _ragged_faults(kind, platform, needs)


def _faults_across_ranks(kind: Kind, needs: AttentionNeeds) -> Iterator[str]:
    """Why no rank can compute a part of a row whose other parts are on other ranks."""
    if kind == "flex":
        yield "its masks are of a rank's own tokens"
    if needs.other_layers:
        kinds = ", ".join(sorted(needs.other_layers))
        yield f"layers of kind {kinds} pass on what came before in another way than attention"
    if kind == "sdpa":  # the other kinds ask for these themselves
        yield from _faults_of_calls(needs) if needs.layers else (needs.fault or NO_CALLS,)


def _faults_of_calls(needs: AttentionNeeds) -> Iterator[str]:
    """The needs that functions of single sequences, without a mask, cannot meet."""
    if not needs.lengths:
        yield "the model does not pass the lengths of sequences on to its layers"
    if not needs.windows_known:
        yield "the model's masks are not the causal windows that its layers name"
    if needs.others:
        yield f"it does not know {', '.join(sorted(needs.others))}"


def _flex_faults(needs: AttentionNeeds) -> Iterator[str]:
    if not needs.flex:
        yield "transformers has none for the model"
    if min(needs.head_dims) < MIN_FLEX_HEAD_DIM:
        yield f"heads of {min(needs.head_dims)} are narrower than {MIN_FLEX_HEAD_DIM}"
    if unknown := needs.others - FLEX_KNOWS:
        yield f"it does not know {', '.join(sorted(unknown))}"


def _ragged_faults(kind: Kind, platform: Platform, needs: AttentionNeeds) -> Iterator[str]:
    """Faults of flash attention's functions for ragged rows, torch's own and the package's."""
    if kind == "varlen" and not platform.varlen:
        yield "this torch has no varlen_attn with windows"
    if kind == "flash" and not platform.flash_attn:
        yield "flash-attn >= 2.6 is not installed"
    if platform.capability < (8, 0):
        yield f"the GPU's compute capability is {platform.capability}, not (8, 0) or higher"
    if not platform.half:
        yield "it computes in 16 bits only, not under train.dtype: float32"
    width = max(needs.head_dims)
    if width > MAX_HEAD_DIM or width % HEAD_DIM_STEP:
        yield f"heads of {width}: at most {MAX_HEAD_DIM}, in steps of {HEAD_DIM_STEP}"
    if needs.soft_cap and kind == "varlen":
        yield "it has no soft cap"
    yield from _faults_of_calls(needs)


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
        kinds = getattr(model.config.get_text_config(), "layer_types", None) or ()
        return replace(needs, other_layers=frozenset(kinds) - OF_ATTENTION)
    return AttentionNeeds(layers=0, lengths=False, head_dims=(0, 0), fault=fault)


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
