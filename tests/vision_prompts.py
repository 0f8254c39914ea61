"""Prompts with images for engines of tiny models, and what transformers computes of them."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np

from async_opd.core.row import Media
from async_opd.core.samples import Prompt
from async_opd.models.engine_args import engine_kwargs
from async_opd.models.processor import ImageProcessor
from tests.vision_models import TOKENS


def noise(width: int, height: int, seed: int) -> bytes:
    """An image of random pixels, encoded."""
    from PIL import Image

    pixels = np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)
    file = BytesIO()
    Image.fromarray(pixels).save(file, "PNG")
    return file.getvalue()


WIDE, TALL = noise(100, 60, 0), noise(30, 200, 1)
IMAGES = {hashlib.sha256(one).hexdigest(): one for one in (WIDE, TALL)}
SIZES = {WIDE: (100, 60), TALL: (30, 200)}
PROMPTS: dict[str, tuple[str, tuple[bytes, ...]]] = {
    "text": ("sort 493021", ()),
    "one": ("|what?", (WIDE,)),
    "after": ("how many dots?|", (TALL,)),
    "two": ("left|right|which?", (WIDE, TALL)),
    "twice": ("|and|", (TALL, TALL)),
}
"""Texts with a bar for each image."""


def media_of(images: Sequence[bytes]) -> tuple[Media, ...]:
    """References to images."""
    return tuple(
        Media(hashlib.sha256(one).hexdigest(), len(one), *SIZES.get(one, (8, 8))) for one in images
    )


def prompt_of(name: str, placeholder: int, teacher: str = "see") -> Prompt:
    """A prompt with short ids."""
    text, images = PROMPTS[name]
    ids = [placeholder if one == "|" else TOKENS.index(one) for one in text]
    return Prompt(name, "see", teacher, np.array(ids, np.int32), media=media_of(images))  # type: ignore[arg-type]


class Fetches:
    """Images by hash, as the queue has them; ``asked`` are the hashes of each fetch."""

    def __init__(self, images: Mapping[str, bytes] = IMAGES) -> None:
        self.images = images
        self.asked: list[Sequence[str]] = []

    async def __call__(self, hashes: Sequence[str]) -> Mapping[str, bytes]:
        self.asked.append(hashes)
        return {one: self.images[one] for one in hashes if one in self.images}


def vision_kwargs(model: Path) -> dict[str, Any]:
    """Arguments of a small CPU engine that takes two images a prompt."""
    from async_opd.config.sections.engine import EngineConfig

    return engine_kwargs(
        EngineConfig(max_model_len=256),
        model=str(model),
        device="cpu",
        tensor_parallel=1,
        seed=0,
        trust_remote_code=False,
        images=2,
    )


class Transformers:
    """A model in transformers, with its processor."""

    def __init__(self, folder: Path) -> None:
        import torch
        from transformers import AutoModelForImageTextToText

        self.processor = ImageProcessor.load(str(folder))
        loaded = AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32)
        self.model: Any = loaded.eval()

    def logprobs(self, rollout: Any, unsampled: Sequence[int] = ()) -> Any:
        """Log-probabilities [R, V] at the response, float64, without ``unsampled`` tokens.

        The rollout's prompt is expanded.
        """
        import torch

        images = [IMAGES[one.sha256] for one in rollout.prompt.media]
        tokens = torch.from_numpy(rollout.token_ids).long()[None]
        inputs = self.processor.inputs(images)
        if "image_grid_thw" in inputs:
            inputs["mm_token_type_ids"] = (tokens == self.processor.placeholder_id).int()
        with torch.no_grad():
            logits = self.model(input_ids=tokens, **inputs).logits[0].double()
        logits[:, list(unsampled)] = -torch.inf
        rows = [at for start, end in rollout.rows for at in range(start, end)]
        return logits[rows].log_softmax(-1).numpy()

    def expanded(self, prompt: Prompt) -> Any:
        """The prompt's ids with the tokens of its images."""
        return self.processor.expand(prompt.token_ids, [IMAGES[m.sha256] for m in prompt.media])
