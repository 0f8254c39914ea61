"""The parts of a vision model, and which of them are frozen.

base_model ─┬─ vision tower        model.visual.blocks…      model.vision_tower…
            ├─ projector           model.visual.merger…      model.multi_modal_projector…
            └─ language model      model.language_model…     model.language_model…
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import Any, Literal

from async_opd.core.errors import StageError
from async_opd.core.stages import TRAINER

Part = Literal["vision_tower", "projector"]
PROJECTOR = re.compile(r"(projector|merger|connector|aligner)", re.IGNORECASE)
"""In names of what lies between a tower and the language model, in the families of transformers."""


def is_vision_model(model: Any) -> bool:
    """Whether a model of transformers, or its decoder, computes images."""
    return getattr(model.config, "vision_config", None) is not None


def language_model(model: Any) -> Any:
    """The part that attends to a row's tokens; of a model that reads text only, the model."""
    return model.get_decoder() if is_vision_model(model) else model


def attention_of(model: Any) -> str:
    """The name of the attention implementation of the language model."""
    return str(language_model(model).config._attn_implementation)


def set_attention_of(model: Any, implementation: str) -> None:
    """Sets that of the language model; a vision tower keeps its own, of images one by one."""
    language_model(model).set_attn_implementation(implementation)


def vision_parameters(model: Any) -> Iterator[tuple[Part, str, Any]]:
    """Each parameter outside of the language model and the head: part, name, parameter."""
    if not is_vision_model(model):
        return
    base, apart = model.base_model, {id(p) for p in language_model(model).parameters()}
    for name, parameter in base.named_parameters():
        if id(parameter) not in apart:
            part: Part = "projector" if PROJECTOR.search(name) else "vision_tower"
            yield part, name, parameter


def freeze(model: Any, parts: Sequence[Part]) -> None:
    """Freezes the parts. StageError for a part that the model does not have."""
    found: set[Part] = set()
    for part, _, parameter in vision_parameters(model):
        found.add(part)
        if part in parts:
            parameter.requires_grad_(False)
    if missing := sorted(set(parts) - found):
        raise StageError(
            TRAINER,
            f"train.freeze names {', '.join(missing)}, and {type(model).__name__} has "
            f"{', '.join(sorted(found)) or 'no vision part'}",
            "leave it out of train.freeze",
        )
