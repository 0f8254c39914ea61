"""The positions of a model in an engine, and the rotary frequencies that vLLM chooses by them.

With LongRoPE vLLM takes one set of factors for all sequences, by ``max_model_len``: the long ones
if that is beyond the model's original positions, which is its default. With dynamic NTK it has the
frequencies of the original positions, and none beyond them. transformers chooses both anew for each
row, by its longest position: ``trainer/student/loading.py`` makes it choose as vLLM does.

Sources: vLLM 0.32, config/model.py (_get_and_verify_max_len) and
model_executor/layers/rotary_embedding.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from async_opd.models.tokenizer import text_settings

if TYPE_CHECKING:
    from async_opd.config.sections.engine import EngineConfig

PHI3_ORIGINAL = 4096
"""The original positions of Phi-3 if its config.json has none."""


def max_model_len(engine: EngineConfig) -> int | None:
    """An engine's ``max_model_len``; None if vLLM derives it from the model."""
    value = engine.extra.get("max_model_len", engine.max_model_len)
    return value if isinstance(value, int) and value > 0 else None


@dataclass(frozen=True)
class Positions:
    """Positions of a model in an engine. ``longest``: tokens of a sequence, None if unknown.

    ``kind`` is the kind of rotary scaling, ``original`` the positions before it, if the kind is
    LongRoPE or dynamic.
    """

    longest: int | None
    kind: str = "default"
    original: int | None = None
    model_positions: int | None = None

    @classmethod
    def of(cls, config: Mapping[str, Any], given: int | None) -> Positions:
        """Reads a config.json, or a transformers' config as a dictionary.

        ``given``: the engine's ``max_model_len``.
        """
        settings = text_settings(config)
        positions = _number(settings.get("max_position_embeddings"))
        kind, rope = _scaling(settings)
        if kind == "longrope":
            named = _number(settings.get("original_max_position_embeddings"))
            if named is None and settings.get("model_type") == "phi3":
                named = PHI3_ORIGINAL
            inner = _number(rope.get("original_max_position_embeddings"))
            if named is None and settings.get("model_type") == "phimoe":
                named = inner
            original = named or inner or positions
            return cls(given or named or positions, kind, original, positions)
        original = positions if "dynamic" in kind else None
        return cls(given or positions, kind, original, positions)

    @property
    def long_factors(self) -> bool:
        """Whether the engine takes LongRoPE's long factors, for all sequences."""
        return (self.longest or 0) > (self.original or 0)

    @property
    def fault(self) -> str:
        """The reason why the engine cannot hold sequences of that length; empty if it can."""
        if "dynamic" in self.kind and self.original and (self.longest or 0) > self.original:
            return (
                f"max_model_len {self.longest} is beyond the {self.original} positions of a model "
                "with dynamic NTK scaling, for which vLLM has no frequencies"
            )
        return ""

    def magnitude(self, rope: Mapping[str, Any]) -> float:
        """LongRoPE's factor of sine and cosine in vLLM."""
        named = rope.get("long_mscale" if self.long_factors else "short_mscale")
        if named is not None:
            return float(named)
        scale = (self.model_positions or 1) / (self.original or 1)
        if scale <= 1:
            return 1.0
        return math.sqrt(1 + math.log(scale) / math.log(self.original or 1))


def _scaling(settings: Mapping[str, Any]) -> tuple[str, Mapping[str, Any]]:
    """The kind of rotary scaling, by vLLM's names, and its parameters."""
    rope = settings.get("rope_scaling") or settings.get("rope_parameters") or {}
    if not isinstance(rope, Mapping):
        return "default", {}
    kind = rope.get("rope_type") or rope.get("type") or "default"
    phi3 = settings.get("model_type") == "phi3"
    return ("longrope" if kind == "su" or (phi3 and kind == "yarn") else str(kind)), rope


def _number(value: Any) -> int | None:
    return value if isinstance(value, int) and value > 0 else None
