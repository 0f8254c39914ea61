"""Families of vision models for which tests show that engines and trainer compute the same.

A family is a ``model_type`` of transformers' ``AutoModelForImageTextToText`` that vLLM has too.
Expansion, inputs and weights have no code for single families: another one is added here when
tests/models/test_vision_engines.py has a tiny model of it.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from safetensors import safe_open

from async_opd.models.engine_args import Device
from async_opd.models.json_files import read_json
from async_opd.models.own_files import weights_file

TAKEN = ("gemma3", "llava", "qwen2_5_vl", "qwen3_vl")
TOWERS = {"llava": "clip_vision_model"}
"""The kind of tower of families that have several."""
NOT_ON_CPU = {
    "gemma3": "vLLM on a CPU hides the later tokens of an image from its earlier ones, which "
    "attend to them in transformers and on GPUs"
}
NOT_TRAINED = {"gemma3": "tokens of an image see each other, and the trainer's rows are causal"}
WITH_PREFIX = ("gemma3", "llava")
"""Families whose towers have weights ``vision_tower.vision_model.…`` on the hub and in vLLM."""
PROCESSORS = ("preprocessor_config.json", "processor_config.json")
"""Files of which a vision model has at least one: the settings of its image processor."""


def refused(config: Mapping[str, Any], device: Device | None, trained: bool) -> str:
    """Why images are not computed by the model of a config.json; empty if they are.

    ``trained``: the model is the student. ``device`` None: nowhere.
    """
    kind = str(config.get("model_type"))
    tower = config.get("vision_config") or {}
    tower = tower.get("model_type") if isinstance(tower, Mapping) else None
    if kind not in TAKEN:
        compared = "vLLM and transformers were not compared on images of this family"
        return f"is a {kind}: {compared}"
    if tower not in (None, TOWERS.get(kind, tower)):
        return f"is a {kind} with a {tower}: only one with a {TOWERS[kind]} was compared"
    if device == "cpu" and kind in NOT_ON_CPU:
        return f"is a {kind}: {NOT_ON_CPU[kind]}"
    return f"is a {kind}: {NOT_TRAINED[kind]}" if trained and kind in NOT_TRAINED else ""


def without_processor(model: Path) -> bool:
    """Whether a directory lacks the settings of an image processor."""
    return not any((model / name).is_file() for name in PROCESSORS)


def renamed_tower(model: Path) -> str | None:
    """The name of a weight of a tower that vLLM does not load, if the model has one.

    transformers 5 gives new models names without ``vision_model``, and reads both. A file that
    cannot be read has no such name.
    """
    try:
        if read_json(model / "config.json").get("model_type") not in WITH_PREFIX:
            return None
        names = [*read_json(model / "model.safetensors.index.json").get("weight_map", {})]
        for file in sorted(model.glob("*.safetensors")) if not names else ():
            with safe_open(weights_file(file), framework="np") as opened:
                names += opened.keys()
    except Exception:  # safetensors has an exception without a base; weights have checks of theirs
        return None
    tower = (name for name in names if name.removeprefix("model.").startswith("vision_tower."))
    return next((name for name in tower if ".vision_model." not in name), None)
