"""Thumbnails: written once an image, small, of recorded prompts; an image is one mark in a text."""

from __future__ import annotations

import hashlib
import json
from dataclasses import replace
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from async_opd.core.row import Media, Row
from async_opd.core.samples import Prompt
from async_opd.core.uid import Uid
from async_opd.data.prompts import PromptStream
from async_opd.pictures import (
    MEDIA,
    PNG_BYTES,
    SIDE,
    RecordedPrompts,
    ShownText,
    Thumbnails,
    folded,
    image_ids,
    read_thumbnail,
    thumbnail,
    thumbnail_file,
)
from tests.data.pictures import BLUE, RED, picture


def media(encoded: bytes) -> Media:
    width, height = Image.open(BytesIO(encoded)).size
    return Media(hashlib.sha256(encoded).hexdigest(), len(encoded), width, height)


def noise(side: int = 600, seed: int = 0) -> bytes:
    """A picture that no encoder makes small."""
    pixels = np.random.default_rng(seed).integers(0, 256, (side, side, 3), np.uint8)
    file = BytesIO()
    Image.fromarray(pixels).save(file, "PNG")
    return file.getvalue()


def test_a_drawing_is_a_png_and_keeps_its_shape() -> None:
    kind, content = thumbnail(picture(1024, 512))
    assert kind == "png"
    assert Image.open(BytesIO(content)).size == (SIDE, SIDE // 2)


def test_a_small_image_is_not_enlarged() -> None:
    _, content = thumbnail(picture(8, 4, "blue"))
    found = Image.open(BytesIO(content))
    assert found.size == (8, 4)
    assert found.getpixel((0, 0)) == (0, 0, 255)


def test_a_picture_whose_png_is_large_is_a_jpeg() -> None:
    kind, content = thumbnail(noise())
    assert kind == "jpeg"
    assert Image.open(BytesIO(content)).format == "JPEG"


def test_equal_images_have_equal_thumbnails() -> None:
    assert thumbnail(noise()) == thumbnail(noise())


def test_a_thumbnail_shows_the_pixels_of_the_model() -> None:
    file = BytesIO()
    Image.new("RGBA", (8, 4), (0, 0, 0, 0)).save(file, "PNG")
    _, content = thumbnail(file.getvalue())
    assert Image.open(BytesIO(content)).getpixel((0, 0)) == (255, 255, 255)


def test_an_image_is_written_once_under_its_own_hash(tmp_path: Path) -> None:
    kept = Thumbnails(tmp_path / MEDIA, 1 << 20)
    kept.keep([media(RED), media(BLUE), media(RED)], {media(o).sha256: o for o in (RED, BLUE)})
    names = {f"{media(one).sha256}.png" for one in (RED, BLUE)}
    assert {path.name for path in (tmp_path / MEDIA).iterdir()} == names
    assert kept.metrics == {"media/thumbnails": 2.0, "media/left_out": 0.0}
    assert kept.notes() == []


def test_a_run_without_images_has_neither_folder_nor_metrics(tmp_path: Path) -> None:
    kept = Thumbnails(tmp_path / MEDIA, 1 << 20)
    kept.keep([], {})
    assert kept.metrics == {}
    assert not (tmp_path / MEDIA).exists()


def test_those_of_an_earlier_process_count_and_are_not_written_again(tmp_path: Path) -> None:
    one = media(RED)
    Thumbnails(tmp_path / MEDIA, 1 << 20).keep([one], {one.sha256: RED})
    again = Thumbnails(tmp_path / MEDIA, 1 << 20)
    again.keep([one], {})
    assert again.metrics == {"media/thumbnails": 1.0, "media/left_out": 0.0}


def test_what_finds_no_room_is_counted_once_and_reported_once(tmp_path: Path) -> None:
    images = [noise(100, seed) for seed in range(4)]
    encoded = {media(one).sha256: one for one in images}
    room = len(thumbnail(images[0])[1]) * 2 + PNG_BYTES // 8
    kept = Thumbnails(tmp_path / MEDIA, room)
    for _ in range(2):
        kept.keep(map(media, images), encoded)
    assert kept.metrics == {"media/thumbnails": 2.0, "media/left_out": 2.0}
    assert sum(path.stat().st_size for path in (tmp_path / MEDIA).iterdir()) <= room
    (note,) = kept.notes()
    assert f"{media(images[2]).sha256} has no thumbnail in media/: log.thumbnails_mib" in note
    assert kept.notes() == []


def test_a_share_of_the_bytes_leaves_the_rest_to_others(tmp_path: Path) -> None:
    images = [noise(100, seed) for seed in range(3)]
    encoded = {media(one).sha256: one for one in images}
    kept = Thumbnails(tmp_path / MEDIA, len(thumbnail(images[0])[1]) * 2 + PNG_BYTES // 8)
    kept.keep(map(media, images[:2]), encoded, share=0.6)
    assert kept.metrics == {"media/thumbnails": 1.0, "media/left_out": 1.0}
    kept.keep([media(images[1])], encoded)
    assert kept.metrics == {"media/thumbnails": 2.0, "media/left_out": 0.0}


def test_an_image_that_cannot_be_read_is_left_out_with_the_reason(tmp_path: Path) -> None:
    one = Media("0" * 64, 4, 8, 8)
    kept = Thumbnails(tmp_path / MEDIA, 1 << 20)
    kept.keep([one], {one.sha256: b"none"})
    assert kept.metrics["media/left_out"] == 1
    (note,) = kept.notes()
    assert "ValueError: cannot be read" in note


def test_a_folder_that_cannot_be_written_ends_nothing(tmp_path: Path) -> None:
    (tmp_path / MEDIA).write_text("a file")
    kept = Thumbnails(tmp_path / MEDIA, 1 << 20)
    kept.keep([media(RED)], {media(RED).sha256: RED})
    assert kept.metrics["media/left_out"] == 1


def test_those_of_the_thread_are_written_when_it_is_closed(tmp_path: Path) -> None:
    one = media(RED)
    kept = Thumbnails(tmp_path / MEDIA, 1 << 20)
    kept.keep_later((one,), {one.sha256: RED})
    assert kept.close(30)
    assert read_thumbnail(tmp_path, one.sha256) == thumbnail(RED)


@pytest.mark.parametrize("sha256", ["../secret", "0" * 63, "A" * 64, "", f"{'0' * 64}\n"])
def test_what_is_no_hash_names_no_file(tmp_path: Path, sha256: str) -> None:
    (tmp_path / MEDIA).mkdir()
    (tmp_path / "secret.png").write_bytes(RED)
    assert thumbnail_file(tmp_path, sha256) is None


def test_a_link_and_a_file_of_another_kind_are_not_shown(tmp_path: Path) -> None:
    (tmp_path / MEDIA).mkdir()
    (tmp_path / "secret").write_bytes(RED)
    (tmp_path / MEDIA / f"{'0' * 64}.png").symlink_to(tmp_path / "secret")
    (tmp_path / MEDIA / f"{'1' * 64}.png").write_text("<svg onload='x'>")
    assert read_thumbnail(tmp_path, "0" * 64) is None
    assert read_thumbnail(tmp_path, "1" * 64) is None


COLORS = ("red", "green", "blue", "black")


def stream() -> PromptStream:
    """Four prompts with an image each, and one without."""
    rows = []
    for number, color in enumerate(COLORS):
        encoded = picture(color=color)
        one = media(encoded)
        row = Row(f"0:{number}", "a", "x", None, {})
        rows.append(replace(row, images=(one,), encoded={one.sha256: encoded}))
    rows.append(Row("0:4", "a", "x", None, {}))
    return PromptStream([rows], [1.0], lambda _: [1], lambda s: s, seed=0, shuffle=False)


def recorded(kept: Thumbnails, share: float, notes: list[str] | None = None) -> RecordedPrompts:
    said = [] if notes is None else notes
    return RecordedPrompts(
        stream(), kept, seed=0, share=share, n=2, notify=lambda text, level: said.append(text)
    )


@pytest.mark.parametrize(("share", "count"), [(1.0, 4), (0.0, 0)])
def test_only_recorded_samples_have_thumbnails(tmp_path: Path, share: float, count: int) -> None:
    kept = Thumbnails(tmp_path / MEDIA, 1 << 20)
    prompts = recorded(kept, share)
    found = prompts.next(5)
    assert [one.uid for one in found if isinstance(one, Prompt)] == [f"0:{i}#0" for i in range(5)]
    assert kept.close(30)
    assert len(list((tmp_path / MEDIA).glob("*.png"))) == count
    assert prompts.metrics.get("media/thumbnails", 0.0) == count


def test_a_prompt_that_is_found_again_leaves_its_thumbnail_too(tmp_path: Path) -> None:
    kept = Thumbnails(tmp_path / MEDIA, 1 << 20)
    recorded(kept, 1.0).find(Uid("0:1#0"))
    assert kept.close(30)
    (path,) = (tmp_path / MEDIA).iterdir()
    assert path.stem == media(picture(color="green")).sha256


def test_the_reason_of_an_image_without_thumbnail_is_a_message(tmp_path: Path) -> None:
    kept, notes = Thumbnails(tmp_path / MEDIA, 0), list[str]()
    prompts = recorded(kept, 1.0, notes)
    prompts.next(4)
    assert kept.close(30)
    assert prompts.metrics["media/left_out"] == 4
    (note,) = notes
    assert "log.thumbnails_mib is full" in note


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
