"""Images of rows: as the source has them, by content, where the messages show them."""

from __future__ import annotations

import base64
import hashlib
import json
import os
import pickle
import sys
import tracemalloc
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as arrow
import pyarrow.parquet as parquet
import pytest
from hypothesis import given
from hypothesis import strategies as st

from async_opd.config.sections.data import DataConfig
from async_opd.core.errors import SourceError
from async_opd.core.row import Media, Row
from async_opd.core.samples import DeadLetter, Prompt
from async_opd.data.files import FileSource
from async_opd.data.prompts import PromptStream, filled, to_prompt
from async_opd.data.stored_rows import read_source
from async_opd.data.streamed_rows import StreamedRows
from async_opd.models.tokenizer import Text
from tests.data.pictures import BLUE, RED, film, picture
from tests.security.hostile_data import datasets_folder

STUDENT = Path(__file__).parents[2] / "examples/quickstart/models/student"


def sha256(encoded: bytes) -> str:
    return hashlib.sha256(encoded).hexdigest()


def text(words: str) -> dict[str, Any]:
    return {"type": "text", "text": words}


def image(encoded: bytes) -> dict[str, Any]:
    return {"type": "image", "image": sha256(encoded)}


def row_of(fields: dict[str, Any], folder: Path | None = None, **data: Any) -> Row:
    """The row that a source makes of these fields."""
    fields = {"data_source": "s"} | fields
    return FileSource(path="x.jsonl").row(fields, "0:0", DataConfig(train=[], **data), folder)


def content(row: Row) -> Any:
    """The content of the only message of the row."""
    (message,) = row.prompt
    assert isinstance(message, dict)
    return message["content"]


@pytest.mark.parametrize(
    ("prompt", "images", "parts"),
    [
        ("<image>How many dots?", [RED], [image(RED), text("How many dots?")]),
        (
            "First <image>, then <image>.",
            [BLUE, RED],
            [text("First "), image(BLUE), text(", then "), image(RED), text(".")],
        ),
        ("<image><image>", [RED, RED], [image(RED), image(RED)]),
        (
            [{"role": "user", "content": [text("Compare"), {"type": "image"}, {"type": "image"}]}],
            [RED, BLUE],
            [text("Compare"), image(RED), image(BLUE)],
        ),
    ],
    ids=["one", "between texts", "one that is shown twice", "parts of messages"],
)
def test_images_are_references_in_the_order_of_their_placeholders_to_bytes_kept_once(
    prompt: Any, images: list[bytes], parts: list[Any]
) -> None:
    row = row_of({"prompt": prompt, "images": images})
    assert content(row) == parts
    assert row.images == tuple(Media(sha256(one), len(one), 8, 4) for one in images)
    assert row.encoded == {sha256(one): one for one in images}


@pytest.mark.parametrize(
    "part",
    [
        {"type": "image", "image": RED},
        {"type": "image", "image": {"bytes": RED, "path": "unused.png"}},
        {"type": "image", "base64": base64.b64encode(RED).decode()},
        {"type": "image", "path": "red.png"},
        {"image": "red.png"},
        {"type": "image", "image": "red.png", "text": None},
        {
            "type": "image_url",
            "image_url": {"url": f"data:image/png;base64,{base64.b64encode(RED).decode()}"},
        },
    ],
)
def test_a_part_may_hold_its_own_image(tmp_path: Path, part: dict[str, Any]) -> None:
    (tmp_path / "red.png").write_bytes(RED)
    messages = [{"role": "user", "content": [part, text("What?")]}]
    row = row_of({"prompt": messages}, tmp_path)
    assert content(row) == [image(RED), text("What?")]
    assert row.encoded == {sha256(RED): RED}


def test_other_forms_of_prompts_are_read_and_text_is_left_as_it_is() -> None:
    row = row_of({"prompt": [{"role": "user", "content": {"type": "image", "image": RED}}]})
    assert content(row) == [image(RED)]
    with pytest.raises(ValueError, match="has 'video', and only text and images are read"):
        row_of({"prompt": [{"role": "user", "content": {"type": "video", "video": "a.mp4"}}]})
    part = {"type": "text", "text": "2 + 2?", "image": None}  # parquet adds such keys
    row = row_of({"prompt": [{"role": "user", "content": [part]}]})
    assert content(row) == [text("2 + 2?")]
    assert row_of({"prompt": "the tag <image>"}).prompt == "the tag <image>"
    row = row_of({"prompt": "2 + 2?", "images": []})
    assert (row.prompt, row.images) == ("2 + 2?", ())


def test_images_come_before_the_first_users_text_without_a_placeholder() -> None:
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "What?"}]
    fields = {"prompt": messages, "images": [RED]}
    prompt = row_of(fields, image_placeholder="").prompt
    assert prompt == [messages[0], {"role": "user", "content": [image(RED), text("What?")]}]
    assert messages[1]["content"] == "What?"


def test_bytes_of_images_lie_neither_in_the_prompt_nor_in_the_fields() -> None:
    part = {"type": "image", "image": BLUE}
    messages = [{"role": "user", "content": [part, {"type": "image"}]}]
    fields = {"extra": {"messages": messages, "level": 3}, "pictures": {"bytes": RED, "path": None}}
    row = row_of(fields, prompt="extra.messages", images="pictures")
    assert row.fields["pictures"] == [sha256(RED)]
    assert row.fields["extra"] == {"messages": row.prompt, "level": 3}
    assert filled("{extra.messages}", row) == row.prompt
    without = pickle.dumps((row.fields, row.prompt))
    assert RED not in without
    assert BLUE not in without


@pytest.mark.parametrize("kind", ["PNG", "JPEG", "WEBP", "BMP", "GIF"])
def test_formats_that_are_read(kind: str) -> None:
    encoded = picture(kind=kind)
    (found,) = row_of({"prompt": "<image>", "images": encoded}).images
    assert found == Media(sha256(encoded), len(encoded), 8, 4)


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"prompt": "What?", "images": [RED]}, r"1 images in 'images' and 0 places .*_placeholder"),
        ({"prompt": "<image>", "images": [RED, RED]}, "2 images in 'images' and 1 places"),
        ({"prompt": "<image><image>", "images": [RED]}, "1 images in 'images' and 2 places"),
        ({"prompt": "<image>", "images": []}, "0 images in 'images' and 1 places"),
        ({"prompt": "<image>", "images": None}, "0 images in 'images' and 1 places"),
        ({"prompt": "<image>", "images": [b"no image"]}, "cannot be read: UnidentifiedImage"),
        ({"prompt": "<image>", "images": [RED[:45]]}, "cannot be read: "),
        ({"prompt": "<image>", "images": [picture(64, 64, kind="JPEG")[:-40]]}, "(?i)truncated"),
        ({"prompt": "<image>", "images": [b""]}, "an image that is bytes, not"),
        ({"prompt": "<image>", "images": [None]}, "an image that is NoneType, not"),
        ({"prompt": "<image>", "images": [[255, 0]]}, "an image that is list, not"),
        ({"prompt": "<image>", "images": [{"bytes": None, "path": None}]}, "that is NoneType"),
        ({"prompt": "<image>", "images": ["https://x.org/a.png"]}, "a URL, which is not downl"),
        ({"prompt": "<image>", "images": ["data:image/png;base64,?"]}, "data URL is not base64"),
        ({"prompt": "<image>", "images": ["red.png"]}, "name its folder in image_folder"),
        ({"prompt": "<image>", "images": [film()]}, "several frames"),
        ({"prompt": "<image>", "images": [RED], "image": [RED]}, "'image', and only text and"),
        ({"prompt": "2 + 2?", "audio": "a.wav"}, "'audio', and only text and images are read"),
        (
            {"prompt": [{"role": "user", "content": [{"type": "input_audio", "data": "a"}]}]},
            "'input_audio', and only text and images are read",
        ),
        (
            {"prompt": [{"role": "user", "content": [{"video": "a.mp4"}]}]},
            "'video', and only text and images are read",
        ),
    ],
)
def test_bad_images_are_refused_with_the_reason(fields: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        row_of(fields)


def test_an_image_of_too_many_pixels_is_refused_before_it_is_decoded() -> None:
    fields = {"prompt": "<image>", "images": [picture(30, 20)[:45]]}  # decoding would fail
    with pytest.raises(ValueError, match=r"30 x 20 pixels, more than data\.max_image_pixels \(599"):
        row_of(fields, max_image_pixels=599)
    assert row_of({**fields, "images": [picture(30, 20)]}, max_image_pixels=600).images


def test_placeholders_are_counted_before_each_becomes_a_part() -> None:
    few = {"prompt": "<image><image>", "images": [RED, BLUE]}
    with pytest.raises(ValueError, match=r"has 2 images, more than data\.max_images \(1\)"):
        row_of(few, max_images=1)
    assert len(row_of(few, max_images=2).images) == 2
    fields = {"prompt": "<image>" * 300_000, "images": []}
    tracemalloc.start()
    with pytest.raises(ValueError, match=r"has 300000 images, more than data\.max_images"):
        row_of(fields)
    assert tracemalloc.get_traced_memory()[1] < 5 * len(fields["prompt"])
    tracemalloc.stop()


def test_images_of_a_row_that_are_too_many_bytes_are_refused(tmp_path: Path) -> None:
    with (tmp_path / "large.png").open("wb") as file:
        file.truncate(17 << 20)
    with pytest.raises(ValueError, match="images of more than 16 MiB"):
        row_of({"prompt": "<image>", "images": ["large.png"]}, tmp_path)


@pytest.mark.parametrize("path", ["../secret.png", "{outside}/secret.png", "link.png"])
def test_no_image_outside_of_the_folder_is_opened(tmp_path: Path, path: str) -> None:
    (tmp_path / "secret.png").write_bytes(RED)
    folder = tmp_path / "data"
    folder.mkdir()
    (folder / "link.png").symlink_to(tmp_path / "secret.png")
    fields = {"prompt": "<image>", "images": [path.format(outside=tmp_path)]}
    with pytest.raises(ValueError, match=r"outside of .*, and nothing there is opened"):
        row_of(fields, folder)
    assert row_of(fields | {"images": ["data/link.png"]}, tmp_path).images


@pytest.mark.parametrize(
    ("path", "said"),
    [
        ("none.png", "No such file"),
        ("", "not bytes"),
        ("a" * 300, "too long"),
        ("b\0", "null"),
        ("pipe", "not a regular file"),
    ],
)
def test_a_path_without_a_file_is_refused(tmp_path: Path, path: str, said: str) -> None:
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(ValueError, match=said):
        row_of({"prompt": "<image>", "images": [path]}, tmp_path)


def read(path: Path, **source: Any) -> list[Row]:
    return list(read_source(FileSource(path=str(path), **source), 0, DataConfig(train=[])))


IMAGE = arrow.struct([("bytes", arrow.binary()), ("path", arrow.string())])
PROMPTS = ["<image>How many?", "2 + 2?", "<image> or <image>?"]


def columns(first: dict[str, Any]) -> arrow.Table:
    """Rows with one image, with none, and with two."""
    second = [{"bytes": RED, "path": None}, {"bytes": BLUE, "path": None}]
    images = arrow.array([[first], None, second], arrow.list_(IMAGE))
    return arrow.table({"prompt": PROMPTS, "data_source": ["s"] * 3, "images": images})


def test_an_image_column_of_the_hub_is_read_from_parquet_beside_text(tmp_path: Path) -> None:
    parquet.write_table(columns({"bytes": BLUE, "path": None}), tmp_path / "a.parquet")
    rows = read(tmp_path / "a.parquet")
    hashes = [[one.sha256 for one in row.images] for row in rows]
    assert hashes == [[sha256(BLUE)], [], [sha256(RED), sha256(BLUE)]]
    assert rows[1].prompt == "2 + 2?"
    assert rows[2].encoded == {sha256(RED): RED, sha256(BLUE): BLUE}
    named = columns({"bytes": None, "path": "blue.png"})  # a file in a datasets directory
    datasets_folder(tmp_path / "set", named, {})
    (tmp_path / "set/blue.png").write_bytes(BLUE)
    assert read(tmp_path / "set")[0].encoded == {sha256(BLUE): BLUE}
    parquet.write_table(columns({"bytes": RED[:45], "path": None}), tmp_path / "a.parquet")
    with pytest.raises(SourceError, match="an image that cannot be read") as caught:
        read(tmp_path / "a.parquet")
    assert (caught.value.source, caught.value.row) == (str(tmp_path / "a.parquet"), 1)


def test_paths_in_jsonl_are_relative_to_it_or_to_the_sources_folder(tmp_path: Path) -> None:
    for folder, encoded in (("data", RED), ("pictures", BLUE)):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "a.png").write_bytes(encoded)
    file = tmp_path / "data/a.jsonl"
    file.write_text(json.dumps({"prompt": "<image>", "data_source": "s", "image": "a.png"}))
    assert read(file, images="image")[0].encoded == {sha256(RED): RED}
    folder = str(tmp_path / "pictures")
    assert read(file, images="image", image_folder=folder)[0].encoded == {sha256(BLUE): BLUE}


def test_without_pillow_an_image_is_refused_and_text_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "PIL", None)
    assert row_of({"prompt": "2 + 2?", "images": []}).images == ()
    with pytest.raises(ImportError) as caught:
        row_of({"prompt": "<image>", "images": [RED]})
    assert caught.value.name == "PIL"


def test_a_prompt_has_its_images_bytes_where_it_was_made_and_a_message_of_it_has_none() -> None:
    row = row_of({"prompt": "<image>?", "images": [RED]})
    prompt = to_prompt(row, lambda _: [1, 2], lambda _: "t", graded=True)
    assert (prompt.media, prompt.encoded) == (row.images, {sha256(RED): RED})
    assert prompt.row is not None
    assert (prompt.row.images, prompt.row.encoded) == (row.images, {})
    assert RED not in pickle.dumps(replace(prompt, teacher="other"), protocol=5)
    assert pickle.loads(pickle.dumps(prompt)).encoded == {}


def stream(path: Path, window: int) -> list[Prompt | DeadLetter]:
    """The prompts of three rows that are streamed, as the quickstart's student reads them."""
    data = DataConfig(train=[])
    source = FileSource(path=str(path), stream=True, window=window)
    rows = StreamedRows(lambda start: source.rows(0, data, start), window)
    encode = Text(STUDENT, chat_template="never").encode
    return PromptStream([rows], [1], encode, lambda _: "t", seed=0, shuffle=False).next(3)


def test_a_streamed_row_with_images_is_a_dead_letter_of_a_text_student(tmp_path: Path) -> None:
    parquet.write_table(columns({"bytes": BLUE[:45], "path": None}), tmp_path / "a.parquet")
    broken, plain, pictured = stream(tmp_path / "a.parquet", 1)
    assert isinstance(plain, Prompt)
    assert isinstance(broken, DeadLetter)
    assert "an image that cannot be read" in broken.reason
    assert isinstance(pictured, DeadLetter)
    assert "the prompt has images, and" in pictured.reason


@pytest.mark.parametrize("part", [image(RED), {"image_url": {"url": "a.png"}}])
def test_the_tokenizer_of_a_text_model_refuses_images(part: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"the prompt has images, and .* reads none"):
        Text(STUDENT).encode([{"role": "user", "content": [part]}])


WORDS = st.text(st.characters(codec="utf-8", exclude_characters="<"), max_size=8)
TURNS = st.lists(st.lists(st.one_of(WORDS, st.sampled_from([RED, BLUE])), max_size=5), min_size=1)


def spelled(parts: list[Any]) -> str:
    """Texts, and the hashes of images among them."""
    return "".join(f"<{sha256(one)}>" if isinstance(one, bytes) else one for one in parts)


@given(TURNS)
def test_text_and_images_of_messages_keep_their_order(turns: list[list[str | bytes]]) -> None:
    given = [one for turn in turns for one in turn if isinstance(one, bytes)]
    texts = ["".join("<image>" if isinstance(one, bytes) else one for one in t) for t in turns]
    messages = [{"role": "user", "content": one} for one in texts]
    row = row_of({"prompt": messages, "images": given}, max_images=len(given) or 1)
    assert [row.encoded[one.sha256] for one in row.images] == given
    for turn, message in zip(turns, row.prompt, strict=True):
        assert isinstance(message, dict)
        shown = message["content"]
        parts = [text(shown)] if isinstance(shown, str) else shown
        found = [row.encoded[one["image"]] if "image" in one else one["text"] for one in parts]
        assert spelled(found) == spelled(turn)
