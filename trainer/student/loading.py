"""Loads the student with transformers, set up to compute the logits that its engines compute.

    directory ──empty_student──► modules on meta ──(shard)──► fill_student ──► weights, attention

The model always stays in eval mode, with gradients: dropout, router noise and all else that a model
does only while ``training`` is true would make q differ from the student that was sampled.

A student on ``meta`` takes no memory until each rank reads its own parts of the weights:

config.json ──modules on meta──► (shard) ──fill──► this rank's parts
                    └──copy────────────────whole──► one that gathers a block at a time

The student has the rotary frequencies of its engines in every row. With LongRoPE or dynamic NTK
scaling, transformers chooses the frequencies by the longest position of a row: the gradient of a
sample would depend on the samples that it is packed with. vLLM chooses them once, when it loads the
model (``async_opd/models/rope.py``).
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from async_opd.config.device_defaults import offloads
from async_opd.core.errors import StageError
from async_opd.core.stages import TRAINER
from async_opd.models.model_files import is_of_class
from async_opd.models.rope import Positions, max_model_len
from async_opd.models.unasked import without_hub
from trainer.layers import set_recomputation
from trainer.notes import note
from trainer.student.adapters import add_adapters
from trainer.student.attention import FLASH, SEQUENCES, VARLEN, register, register_flex
from trainer.student.attention_choice import (
    Attention,
    Platform,
    attention_needs,
    choose_attention,
    platform_of,
    sequences_apart,
)
from trainer.student.sharding import await_ranks, blocks_of, full_tensor, is_sharded
from trainer.student.stored_weights import StoredWeights
from trainer.vision.parts import attention_of, freeze, set_attention_of

RECOMPILE_LIMIT = 32
"""Of one function. Flex attention needs two for each kind of mask, with gradients and without."""

if TYPE_CHECKING:
    from async_opd.config.run_config import RunConfig
    from trainer.rank_group import RankSpec


def pin_rotary(model: Any, max_model_len: int | None) -> int | None:
    """Fixes the model's frequencies to its engines'; returns the tokens of their longest sequence.

    The model's own config does not change. StageError for a scaling that no engine computes, or
    that the engines compute in another way.
    """
    positions = Positions.of(model.config.get_text_config().to_dict(), max_model_len)
    if positions.fault:
        raise StageError(
            "trainer",
            f"{type(model).__name__}: {positions.fault}",
            f"set rollout.engine.max_model_len: {positions.original}",
        )
    for module in model.modules():
        kind = getattr(module, "rope_type", None)
        of_layers = kind.values() if isinstance(kind, dict) else ()
        if any(one == "longrope" or "dynamic" in one for one in of_layers):
            raise StageError(
                "trainer",
                f"{type(model).__name__} has rotary frequencies by layer of kinds "
                f"{sorted(set(of_layers))}, of which some depend on the longest position",
                "this architecture is not supported: choose another student.model",
            )
        if kind == "longrope":
            _pin_longrope(module, positions)
        elif isinstance(kind, str) and "dynamic" in kind:
            _pin_dynamic(model, module)
    return positions.longest


def _pin_longrope(module: Any, positions: Positions) -> None:
    """Gives the module a separate config, in which both sets of factors are the engine's."""
    module.config = copy.deepcopy(module.config)
    rope = module.config.rope_parameters
    magnitude = positions.magnitude(rope)
    factors = rope["long_factor" if positions.long_factors else "short_factor"]
    rope |= {
        "long_factor": factors,
        "short_factor": factors,
        "attention_factor": magnitude,
        "long_mscale": magnitude,
        "short_mscale": magnitude,
    }
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    frequencies, module.attention_scaling = ROPE_INIT_FUNCTIONS["longrope"](
        module.config, module.inv_freq.device
    )
    module.inv_freq = frequencies
    module.original_inv_freq = frequencies.clone()


def _pin_dynamic(model: Any, module: Any) -> None:
    """Fixes the frequencies to those of the original positions."""
    if "max_trained_positions" in module.config.rope_parameters:
        raise StageError(
            "trainer",
            f"{type(model).__name__} has dynamic NTK scaling with max_trained_positions, which "
            "transformers does not implement",
            "this model is not supported: choose another student.model",
        )
    module.rope_type = "default"


class EmptyStudent:
    """A causal language model, which may see, without its weights, in float32 and eval mode."""

    def __init__(
        self, directory: Path, max_model_len: int | None = None, trust_remote_code: bool = False
    ) -> None:
        """Reads no weight. StageError, with names, if the files do not hold those of the model.

        ``max_model_len``: the engines', for rotary factors (``trainer.student.loading``).
        """
        self.model = _on_meta(directory, trust_remote_code)
        self._copy = copy.deepcopy(self.model)
        self._weights = StoredWeights(self.model, directory)
        self._max_model_len = max_model_len
        settings = self.model.config.get_text_config().to_dict()
        self.longest = Positions.of(settings, max_model_len).longest
        """Tokens of the engines' longest sequence; None without a bound."""
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
    for key in filter(is_of_class, list(vars(settings))):  # saving them would copy files
        del vars(settings)[key]
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


def empty_student(config: RunConfig, device: torch.device) -> EmptyStudent:
    """The student of a run without its weights; layers recompute where ``device`` trains so.

    StageError if its files do not hold its weights, or the config's adapters fit no layer.
    """
    student = EmptyStudent(
        Path(config.student.model),
        max_model_len(config.rollout.engine),
        config.student.trust_remote_code,
    )
    freeze(student.model, config.train.freeze)
    if config.train.lora is not None:
        add_adapters(student.model, config.train.lora)
    set_recomputation(student.model, config.train, device.type)
    return student


def fill_student(
    student: EmptyStudent, config: RunConfig, device: torch.device, spec: RankSpec | None = None
) -> Any:
    """Reads the weights onto the device, and sets the attention that trains there.

    Of a sharded student a collective; the rank of the ``spec`` awaits all others before. Returns
    ``EmptyStudent.whole``. StageError if no attention can compute packed rows of it there.
    """
    in_host_memory = offloads(config.train, device.type) == "parameters"
    student.fill(device, torch.device("cpu") if in_host_memory else None)
    if spec is not None:
        await_ranks(spec, "weights")
    whole = student.whole()
    platform = platform_of(device, in_bfloat16(config.train.dtype, device))
    across, wanted = config.train.context_parallel > 1, config.train.attention
    if config.train.compile is True and device.type == "cpu":
        wanted = "sdpa"  # no graph has a loop over as many sequences as there are in a row
    set_attention(whole, wanted, platform, across)
    if whole is not student.model:
        set_attention_of(student.model, attention_of(whole))
    return whole


def set_attention(model: Any, wanted: Attention, platform: Platform, across: bool = False) -> None:
    """Sets what computes the model's attention; see choose_attention.

    On a CPU it is sdpa of one sequence after the other, where the model allows it. ``sdpa`` is
    eager where transformers has no sdpa for the model, or sdpa would be wrong.
    ``across``: ranks share each row, for which ``trainer.context.Context`` then sets it once more.
    """
    settings, chosen = model.config.get_text_config(), attention_of(model)
    if across:
        wanted = choose_attention(wanted, platform, attention_needs(model), across)
        set_attention_of(model, chosen)
    elif wanted == "auto" and platform.device == "cpu":
        apart = sequences_apart(attention_needs(model))
        register()
        set_attention_of(model, SEQUENCES if apart else chosen)
        if apart:
            return
    if wanted == "sdpa" or (wanted == "auto" and platform.device == "cpu"):
        if getattr(settings, "attn_logit_softcapping", None):
            set_attention_of(model, "eager")  # sdpa ignores the soft cap without an error
        if platform.device != "cpu" and not across:
            note("attention of packed rows: sdpa, with a mask of each whole row for each layer")
        return
    kind = choose_attention(wanted, platform, attention_needs(model))
    register()
    names = {"varlen": VARLEN, "flash": FLASH, "flex": "flex_attention"}
    set_attention_of(model, names[kind])
    note(f"attention of packed rows: {kind}")
    if kind == "flex":
        register_flex()
        refuse_eager_flex()


def refuse_eager_flex() -> None:
    """Makes too many compilations an error: torch would go on, with T² scores for each layer.

    In every thread of the process. torch keeps a value that is assigned to its config for the
    assigning context only; layers run in the contexts of later calls, and on a GPU their backward
    passes on a thread of autograd's own.
    """
    from torch._dynamo import config

    entries: Any = config._config  # type: ignore[attr-defined]
    entries["recompile_limit"].default = RECOMPILE_LIMIT
    entries["fail_on_recompile_limit_hit"].default = True


def in_bfloat16(dtype: str, device: torch.device) -> bool:
    """Whether a student with this ``train.dtype`` computes in bfloat16 on the device."""
    return dtype == "bfloat16" or (dtype == "auto" and device.type == "cuda")
