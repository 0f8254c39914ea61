"""Gives the student the rotary frequencies of its engines, in every row.

With LongRoPE or dynamic NTK scaling, transformers chooses the frequencies by the longest position
of a row: the gradient of a sample would depend on the samples that it is packed with. vLLM chooses
them once, when it loads the model (``async_opd/models/rope.py``).
"""

from __future__ import annotations

import copy
from typing import Any

from async_opd.core.errors import StageError
from async_opd.models.rope import Positions


def pin_rotary(model: Any, max_model_len: int | None) -> int | None:
    """Fixes the model's frequencies to its engines'; returns the tokens of their longest sequence.

    The model's own config does not change. StageError for a scaling that no engine computes, or
    that the engines compute in another way.
    """
    settings = model.config.get_text_config()
    positions = Positions.of(settings.to_dict(), max_model_len)
    if positions.fault:
        raise StageError(
            "trainer",
            f"{type(model).__name__}: {positions.fault}",
            f"set rollout.engine.max_model_len: {positions.original}",
        )
    for module in model.modules():
        kind = getattr(module, "rope_type", None)
        if isinstance(kind, dict) and any(map(_varies, kind.values())):
            raise StageError(
                "trainer",
                f"{type(model).__name__} has rotary frequencies by layer of kinds "
                f"{sorted(set(kind.values()))}, of which some depend on the longest position",
                "this architecture is not supported: choose another student.model",
            )
        if kind == "longrope":
            _pin_longrope(module, positions)
        elif isinstance(kind, str) and "dynamic" in kind:
            _pin_dynamic(model, module)
    return positions.longest


def _varies(kind: str) -> bool:
    return kind == "longrope" or "dynamic" in kind


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
