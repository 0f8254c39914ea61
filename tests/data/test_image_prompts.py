"""Prompts with images as token ids: one placeholder an image, for students and teachers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from async_opd.core.errors import RolloutFault
from async_opd.core.row import Media, Row
from async_opd.data.prompts import filled, to_prompt
from async_opd.data.teacher_prompts import teacher_readers
from async_opd.models.tokenizer import Text
from tests.vision_models import SIZE, TOKENS, TURNS, tokenizer
from tests.world.config import run_config

PAD = TOKENS.index("<|image_pad|>")
ONE, TWO = (Media(letter * 64, 10, 8, 8) for letter in "ab")


def image(media: Media) -> dict[str, str]:
    return {"type": "image", "image": media.sha256}


def text(value: str) -> dict[str, str]:
    return {"type": "text", "text": value}


def row(*parts: dict[str, str], **fields: Any) -> Row:
    """A row whose prompt is one message of these parts."""
    messages = [{"role": "user", "content": list(parts)}]
    shown = [one for one in (ONE, TWO) for part in parts if part.get("image") == one.sha256]
    return Row("0:4", "see", messages, None, {"prompt": messages, **fields}, images=tuple(shown))


def files(folder: Path, template: str, **config: int) -> Path:
    """A model's directory as far as prompts need it."""
    import json

    tokenizer(template).save_pretrained(folder)
    (folder / "config.json").write_text(json.dumps({"vocab_size": SIZE, **config}))
    return folder


QWEN = TURNS.replace("IMAGE", "<|vision_start|><|image_pad|><|vision_end|>")


@pytest.fixture
def qwen(tmp_path: Path) -> Text:
    return Text(files(tmp_path, QWEN, image_token_id=PAD), processor=refuse)


def refuse() -> Any:
    raise AssertionError("only lengths need a processor")


def test_a_prompt_has_one_placeholder_an_image(qwen: Text) -> None:
    ids = qwen.encode(row(image(ONE), text("?"), image(TWO)).prompt)
    shown = [one for one in ids if one in (PAD, TOKENS.index("?"))]
    assert shown == [PAD, TOKENS.index("?"), PAD]


def test_a_placeholder_that_a_text_spells_stays_text(qwen: Text) -> None:
    spelled = row(image(ONE), text("<|image_pad|>"))
    assert qwen.encode(spelled.prompt).count(PAD) == 1
    assert qwen.encode("<|image_pad|>?").count(PAD) == 0


@pytest.mark.parametrize(
    ("template", "prompt", "said"),
    [
        (QWEN, "<|image_pad|>?", r"has 0 images, and '<\|image_pad\|>' 1 times"),
        (
            "{% for m in messages %}{{ m.content[0].text }}{% endfor %}",
            row(text("what?"), image(ONE)).prompt,
            r"has 1 images, and .* 0 times",
        ),
    ],
    ids=["a placeholder without an image", "a template that drops images"],
)
def test_as_many_placeholders_as_images(
    tmp_path: Path, template: str, prompt: Any, said: str
) -> None:
    parsing = Text(files(tmp_path, template, image_token_id=PAD), special_tokens="parse")
    with pytest.raises(ValueError, match=said):
        parsing.encode(prompt)


def test_of_several_image_tokens_that_of_the_template_is_the_placeholder(tmp_path: Path) -> None:
    other = TOKENS.index("<image>")
    folder = files(tmp_path, QWEN, image_token_index=other, boi_token_index=PAD)
    assert Text(folder).placeholder == PAD


@pytest.mark.parametrize(
    ("template", "prompt"),
    [
        (
            "{% for m in messages %}{% for p in m.content | selectattr('type', 'equalto', 'text')"
            " %}{{ p.text }}{% endfor %}{% endfor %}",
            "what?",
        ),
        (
            "{% for m in messages %}{% if m.content is string %}{{ m.content }}{% endif %}"
            "{% endfor %}",
            row(text("wh"), text("at?")).prompt,
        ),
    ],
    ids=["a template of parts alone", "a template of texts alone"],
)
def test_a_prompt_is_shown_as_its_template_reads(
    tmp_path: Path, template: str, prompt: Any
) -> None:
    made = Text(files(tmp_path, template, image_token_id=PAD))
    assert made.decode(made.encode(prompt)) == "what?"


def prompt_of(made: Text, one: Row, template: str | None = None, **options: Any) -> Any:
    teacher = {"model": "m", "prompt_template": template}
    readers = teacher_readers(run_config(teachers={"t": teacher}), made)
    return to_prompt(one, made.encode, lambda _: "t", readers=readers or None, **options)


def test_a_teachers_template_of_the_prompt_alone_shows_its_images(qwen: Text) -> None:
    one = row(image(ONE), text("what?"))
    prompt = prompt_of(qwen, one, "{prompt}")
    assert prompt.teacher_ids.tolist() == prompt.token_ids.tolist() == qwen.encode(one.prompt)


def test_images_stay_where_they_are_in_a_teachers_longer_template(qwen: Text) -> None:
    one = row(image(ONE), text("or"), image(TWO), text("?"), hint="no")
    prompt = prompt_of(qwen, one, "Look. {prompt} ({hint})")
    parts = [text("Look. "), image(ONE), text("or"), image(TWO), text("? (no)")]
    assert filled("Look. {prompt} ({hint})", one) == [{"role": "user", "content": parts}]
    assert prompt.teacher_ids.tolist() == qwen.encode(row(*parts).prompt)
    with pytest.raises(RolloutFault, match="shows 0 images, not the row's 2"):
        prompt_of(qwen, one, "Answer {hint}")


def test_a_prompts_length_has_the_tokens_of_its_images(qwen: Text) -> None:
    one = row(image(ONE), text("what?"))
    fits = len(qwen.encode(one.prompt)) + 9
    assert prompt_of(qwen, one, limit=fits, sized=lambda _: 10).media == (ONE,)
    with pytest.raises(RolloutFault, match=f"has {fits} tokens, at most {fits - 1} fit"):
        prompt_of(qwen, one, limit=fits - 1, sized=lambda _: 10)
    with pytest.raises(RolloutFault, match="at most 3 fit"):  # never cut off
        prompt_of(qwen, one, limit=3, sized=lambda _: 1, truncate=True)


def test_an_unread_medium_is_refused(qwen: Text) -> None:
    with pytest.raises(ValueError, match="parts of type video: only images are read"):
        qwen.encode([{"role": "user", "content": [{"type": "video", "video": "a.mp4"}]}])
