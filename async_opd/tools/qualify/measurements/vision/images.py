"""Training steps of a VLM student: the memory that images take.

``trainer.rank.Rank`` with a student of Qwen3-VL's shape and random weights. Three quarters of each
sequence are one image. Varied: recomputation.

    image_tokens   tokens of the row that stand for images: four patches each
    peak_gib       most memory of torch's tensors in a step of two such rows
    planned_gib    what ``async_opd.memory.step`` plans for it: as if all tokens were of images
    backward_ms    the forward and backward pass
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from math import isqrt
from typing import Any

import numpy as np
import torch

from async_opd.config.device_defaults import Recomputation
from async_opd.core.row import Media
from async_opd.core.samples import Rollout, Sample
from async_opd.memory.step import Step, peak
from async_opd.models import torchvision_operators
from async_opd.models.model_size import ModelSize
from async_opd.tools.qualify.measurements.measuring import (
    GIB,
    Figures,
    Report,
    milliseconds,
)
from async_opd.tools.qualify.measurements.rank import RECOMPUTATIONS, attend
from async_opd.tools.qualify.measurements.students import COMMON, SHAPES, rank_of, samples
from trainer.batches.micro_batches import MicroBatch
from trainer.batches.token_weights import TokenWeight
from trainer.layers import recompute_activations
from trainer.vision.images import Sight

VISION_SHAPES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "qwen3-vl-2b": (
        {**SHAPES["qwen3-0.6b"], "hidden_size": 2048, "intermediate_size": 6144},
        {"out_hidden_size": 2048},
    ),
    "tiny": (
        SHAPES["tiny"],
        {
            "depth": 2,
            "hidden_size": 32,
            "intermediate_size": 48,
            "num_heads": 2,
            "out_hidden_size": 64,
            "deepstack_visual_indexes": [0],
        },
    ),
}
"""Of the decoder and the tower, beside Qwen3-VL's own; ``tiny`` is for the CPU."""
SIZES = {"cuda": ("qwen3-vl-2b", 16384, 4096), "cpu": ("tiny", 144, 72)}
"""The shape, and the tokens of a row and of each sequence in it."""
MERGE = 2
"""Patches of a side of the square that becomes one token."""


def student(shape: str, device: torch.device) -> Any:
    """A model with random float32 weights, made on the device, in eval mode."""
    torchvision_operators.install()
    from transformers import Qwen3VLConfig, Qwen3VLForConditionalGeneration

    text, vision = VISION_SHAPES[shape]
    sections = [text.get("head_dim", COMMON["head_dim"]) // 2 - 10, 5, 5]
    rope = {**COMMON["rope_parameters"], "mrope_section": sections, "mrope_interleaved": True}
    vocabulary = text.get("vocab_size", COMMON["vocab_size"])
    named = ("image", "video", "vision_start", "vision_end")
    special = {f"{name}_token_id": vocabulary - 1 - at for at, name in enumerate(named)}
    config = Qwen3VLConfig(
        text_config={**COMMON, **text, "rope_parameters": rope},
        vision_config=vision,
        tie_word_embeddings=True,
        **special,
    )
    torch.manual_seed(0)
    with device:
        return Qwen3VLForConditionalGeneration(config).eval()


class Images:
    """The inputs of a processor, of images of random numbers: squares of ``side`` tokens."""

    def __init__(self, config: Any, side: int) -> None:
        vision = config.vision_config
        self._side = side * MERGE
        self._numbers = 3 * vision.temporal_patch_size * vision.patch_size**2

    def inputs(self, images: list[bytes]) -> dict[str, torch.Tensor]:
        """Pixels of each patch, and patches of each image."""
        patches = len(images) * self._side**2
        grid = torch.tensor([[1, self._side, self._side]] * len(images))
        return {"pixel_values": torch.randn(patches, self._numbers), "image_grid_thw": grid}


def with_images(config: Any, sequences: int, length: int) -> tuple[list[Sample], int]:
    """A sample for each sequence, and the tokens on a side of its image."""
    side = isqrt(length * 3 // 4 - 2)
    begin, end = config.vision_start_token_id, config.vision_end_token_id
    image = np.asarray([begin, *[config.image_token_id] * side**2, end], np.int32)
    found = []
    for number, text in enumerate(samples(end - 3, [length - len(image)] * sequences)):
        one = text.rollout
        ids = np.concatenate([image, one.prompt.token_ids])
        prompt = replace(one.prompt, token_ids=ids, media=(Media(str(number), 0, side, side),))
        sampled = one.response_ids, one.rollout_logprobs, one.version_spans
        found.append(Sample(Rollout.plain(one.uid, prompt, *sampled, "stop"), text.scores))
    return found, side


def step(recompute: Recomputation, device: torch.device) -> Figures:
    """Figures of steps with one kind of recomputation."""
    shape, tokens, length = SIZES[device.type]
    model = student(shape, device)
    attend(model, "auto", device)
    if recompute != "none":
        recompute_activations(model, recompute)
    rank, config = rank_of(model, device), model.config
    batch, side = with_images(config, tokens // length, length)
    rank.student.sight = Sight(lambda: Images(config, side), model.base_model, device)  # type: ignore[arg-type, return-value]
    encoded = {one.sha256: b"" for sample in batch for one in sample.rollout.prompt.media}
    weights = (TokenWeight(1 / tokens),) * len(batch)
    micro_batch = MicroBatch(tuple(batch), weights, images=encoded)
    rank.backward([micro_batch])
    rank.apply(1e-5)
    ms = milliseconds(device, lambda: rank.backward([micro_batch]), repeats=3, warm_up=0)
    rank.apply(None)
    rank.backward([micro_batch, micro_batch])
    used = rank.apply(None)
    named = [
        (name, tuple(weight.shape), "F32")
        for name, weight in student(shape, torch.device("meta")).named_parameters()
    ]
    plan = Step(
        ModelSize.of(config.to_dict(), named),
        "cuda" if device.type == "cuda" else "cpu",
        tokens=tokens,
        responses=sum(len(sample.rollout.response_ids) for sample in batch),
        half=rank.student.half,
        recompute=recompute,
        mask=model.config._attn_implementation in ("sdpa", "eager"),
    )
    planned = sum(peak(plan).values()) / GIB
    return {
        "image_tokens": len(batch) * side**2,
        "tokens": sum(sample.rollout.tokens for sample in batch),
        "backward_ms": ms,
        "peak_gib": None if used is None else used.peak / GIB,
        "planned_gib": planned,
        "peak_ratio": None if used is None else used.peak / GIB / planned,
    }


def main(report: Report) -> None:
    """A cell for each kind of recomputation."""
    shape = SIZES[report.device.type][0]
    for one in RECOMPUTATIONS:
        report.cell(partial(step, one, report.device), what="step", shape=shape, recompute=one)
