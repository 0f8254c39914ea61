"""Tokens of a prompt with images as text: each image's tokens are one mark, not hundreds of them.

… <|image_pad|> x 64 …  ──decode──►  … <image 64 tokens> …
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path

from async_opd.core.row import Media
from async_opd.models.json_files import read_json
from async_opd.models.tokenizer import Text
from async_opd.pictures.folder import titled

KEYS = ("image_token_id", "image_token_index")
"""Keys of a config.json for the token that an image is computed at."""
SHORT = ("boi_token_id", "boi_token_index")
"""Those for one that stands for an image before it is expanded, in some families."""


def image_ids(model_dir: str | Path) -> frozenset[int]:
    """The tokens of images in a model's prompts; none for a model that reads text alone.

    None either where its config.json cannot be read: texts are only shown.
    """
    try:
        config = read_json(Path(model_dir) / "config.json")
    except (OSError, ValueError):
        return frozenset()
    found = (config.get(key) for key in (*KEYS, *SHORT))
    return frozenset(one for one in found if isinstance(one, int))


def folded(ids: Sequence[int], of_images: Collection[int]) -> list[list[int] | str]:
    """The tokens in parts: lists of text's tokens, and the mark of each run of image tokens."""
    parts: list[list[int] | str] = []
    for is_image, group in groupby(ids, lambda one: one in of_images):
        run = list(group)
        parts.append(_mark(run) if is_image else run)
    return parts


def _mark(run: Sequence[int]) -> str:
    tokens = max(Counter(run).values())
    return f"<image {tokens} tokens>" if tokens > 1 else "<image>"


@dataclass(frozen=True)
class ShownText:
    """A tokenizer whose texts have a mark in place of an image's tokens."""

    text: Text
    of_images: frozenset[int]

    @classmethod
    def of(cls, text: Text, model_dir: str | Path) -> ShownText:
        """That of a model, whose tokenizer is ``text``."""
        return cls(text, image_ids(model_dir))

    def decode(self, ids: list[int]) -> str:
        """Text of a sequence, without special tokens."""
        if self.of_images.isdisjoint(ids):
            return self.text.decode(ids)
        parts = folded(ids, self.of_images)
        return "".join(one if isinstance(one, str) else self.text.decode(one) for one in parts)

    def token(self, token: int) -> str:
        """Text of one token, as it stands within a text."""
        return self.text.token(token)

    def pieces(self, ids: Sequence[int], pieces: Sequence[str], images: Sequence[Media]) -> str:
        """The pieces of a prompt that is not expanded joined, with the size of each image."""
        sizes = iter(images)
        found = zip(ids, pieces, strict=True)
        return "".join(
            titled(size)
            if one in self.of_images and (size := next(sizes, None)) is not None
            else piece
            for one, piece in found
        )
