"""An image's tokens are one mark in a text."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from async_opd.core.row import Media
from async_opd.pictures import ShownText, folded, image_ids

PAD = 7


class Letters:
    """A tokenizer of letters, which leaves out token 0 as a special one."""

    def decode(self, ids: list[int]) -> str:
        return "".join(chr(96 + one) for one in ids if one)

    def token(self, token: int) -> str:
        return chr(96 + token)


def shown(*of_images: int) -> ShownText:
    text: Any = Letters()
    return ShownText(text, frozenset(of_images))


def test_a_prompt_without_images_is_as_its_tokenizer_decodes_it() -> None:
    assert shown(PAD).decode([1, 0, 2]) == "ab"


def test_each_image_is_one_mark_with_the_number_of_its_tokens() -> None:
    ids = [1, 0, *[PAD] * 64, 0, *[PAD] * 16, 0, 2]
    assert shown(PAD).decode(ids) == "a<image 64 tokens><image 16 tokens>b"


def test_a_placeholder_that_is_not_expanded_is_a_mark_without_a_number() -> None:
    assert shown(PAD).decode([PAD, 1]) == "<image>a"


def test_an_image_counts_the_tokens_that_it_is_computed_at() -> None:
    assert folded([1, 8, *[PAD] * 4, 2], {PAD, 8}) == [[1], "<image 4 tokens>", [2]]


def test_a_prompt_before_its_expansion_shows_the_sizes_of_its_images() -> None:
    images = [Media("a" * 64, 9, 640, 480), Media("b" * 64, 9, 32, 16)]
    pieces = ["<s>", "<pad>", "a", "<pad>", "<pad>"]
    text = shown(PAD).pieces([0, PAD, 1, PAD, PAD], pieces, images)
    assert text == "<s><image 640x480>a<image 32x16><pad>"


def test_the_tokens_of_images_are_those_of_the_models_config(tmp_path: Path) -> None:
    config = {"image_token_id": 5, "boi_token_index": 6, "vocab_size": 9}
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert image_ids(tmp_path) == {5, 6}


def test_a_model_without_a_config_has_none(tmp_path: Path) -> None:
    assert image_ids(tmp_path) == frozenset()
