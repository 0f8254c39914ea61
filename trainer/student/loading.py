"""Loads the student with transformers, set up to compute the logits that its engines compute.

    directory ──empty_student──► modules on meta ──(shard)──► fill_student ──► weights, attention

The model always stays in eval mode, with gradients: dropout, router noise and all else that a model
does only while ``training`` is true would make q differ from the student that was sampled.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from async_opd.config.device_defaults import offloads
from async_opd.models.rope import max_model_len
from trainer.layers.recomputation import set_recomputation
from trainer.notes import note
from trainer.student.adapters import add_adapters
from trainer.student.attention import FLASH, SEQUENCES, VARLEN, register
from trainer.student.attention_choice import Attention, Platform, choose_attention, sequences_apart
from trainer.student.attention_probe import attention_needs, platform_of
from trainer.student.empty import EmptyStudent
from trainer.student.sharding import await_ranks
from trainer.vision.parts import attention_of, freeze, set_attention_of

RECOMPILE_LIMIT = 32
"""Of one function. Flex attention needs two for each kind of mask, with gradients and without."""

if TYPE_CHECKING:
    from async_opd.config.run_config import RunConfig
    from trainer.rank_spec import RankSpec


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
    if config.train.compile and device.type == "cpu":
        wanted = "sdpa"  # no graph has a loop over as many sequences as there are in a row
    set_attention(whole, wanted, platform, across)
    if whole is not student.model:
        set_attention_of(student.model, attention_of(whole))
    return whole


def load_student(config: RunConfig, device: torch.device) -> Any:
    """The whole model in float32 on the device, in eval mode, with the attention that trains."""
    return fill_student(empty_student(config, device), config, device)


def set_attention(model: Any, wanted: Attention, platform: Platform, across: bool = False) -> None:
    """Sets what computes the model's attention; see choose_attention.

    On a CPU it is sdpa of one sequence after the other, where the model allows it. ``sdpa`` is
    eager where transformers has no sdpa for the model, or sdpa would be wrong.
    ``across``: ranks share each row, for which ``parallel.Context`` then sets it once more.
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
