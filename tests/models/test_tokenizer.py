"""Chat templates see what transformers shows them; prompts are tokenized whole."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from tokenizers import Tokenizer

from async_opd.models import chat_template
from async_opd.models.tokenizer import Text, eos_ids
from tests.checks.inputs import model

MESSAGES = [{"role": "user", "content": "sort <1> & é="}]
LOOP = "{% for m in messages %}"
CHAT = (
    LOOP + "\n<{{ m['role'] }}>{{ m['content'] }}{% endfor %}"
    "\n{% if add_generation_prompt %}<assistant>{% endif %}"
)


@pytest.mark.parametrize(
    "template",
    [
        pytest.param(LOOP + "{{ m.content | tojson }}{% endfor %}", id="json without HTML escapes"),
        pytest.param("{% if tools is not none %}tools{% endif %}x", id="tools are none"),
        pytest.param("{% if documents is not none %}docs{% endif %}x", id="documents are none"),
        pytest.param("{{ unk_token }}{{ bos_token }}x", id="all special tokens"),
        pytest.param(
            LOOP + "{% generation %}{{ m.content }}{% endgeneration %}{% endfor %}", id="generation"
        ),
        pytest.param("{{ strftime_now('%Y') }}", id="the date"),
        pytest.param(CHAT, id="roles and a generation prompt"),
    ],
)
def test_a_template_renders_as_theirs(tmp_path: Path, quickstart: str, template: str) -> None:
    from transformers import AutoTokenizer

    for name in ("tokenizer.json", "tokenizer_config.json", "config.json"):
        shutil.copy(f"{quickstart}/models/student/{name}", tmp_path)
    (tmp_path / "chat_template.jinja").write_text(template, encoding="utf-8")
    expected = AutoTokenizer.from_pretrained(str(tmp_path)).apply_chat_template(
        MESSAGES, add_generation_prompt=True, return_dict=False
    )
    text = Text(tmp_path)
    assert text.encode(MESSAGES) == text.encode(MESSAGES[0]["content"]) == expected
    never = Text(tmp_path, "never")
    assert never.decode(never.encode("sort 21=")) == "sort 21="


def test_text_without_a_template_gives_what_transformers_gives(quickstart: str) -> None:
    from transformers import AutoTokenizer

    path = f"{quickstart}/models/student"
    made = Text(path)
    ids = made.encode("sort 493021=")
    assert ids == AutoTokenizer.from_pretrained(path).encode("sort 493021=")
    assert "".join(map(made.token, made.plain("sort 31=13"))) == "sort 31=13"
    with pytest.raises(ValueError, match="no chat template"):
        made.encode(MESSAGES)
    assert eos_ids(path) == (2,)


def test_stored_padding_and_truncation_do_not_apply(tmp_path: Path, quickstart: str) -> None:
    shutil.copy(f"{quickstart}/models/student/tokenizer.json", tmp_path)
    expected = Text(tmp_path).encode("sort 493021=")
    tokenizer = Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    tokenizer.enable_truncation(3)
    tokenizer.enable_padding(length=40)
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    assert Text(tmp_path).encode("sort 493021=") == expected


CHATML = LOOP + "<{{ m.role }}>{{ m.content }}<eos>\n{% endfor %}"


def with_template(folder: Path, quickstart: str, template: str | None) -> Path:
    """The quickstart's student, with this chat template or none."""
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(f"{quickstart}/models/student/{name}", folder)
    if template is not None:
        (folder / "chat_template.jinja").write_text(template, encoding="utf-8")
    return folder


@pytest.mark.parametrize(
    ("template", "token"),
    [
        (CHATML, "<eos>"),
        (LOOP + "{{ m.content }}{{ eos_token }}{% endfor %}", "<eos>"),
        (LOOP + "{{ m.content }} ;<pad> {{ eos_token }}{% endfor %}", "<pad>"),
        (LOOP + "<bos>{{ m.content }}{% endfor %}", None),
        ("<bos>{{ messages | length }}<eos>", None),
        ("{{ raise_exception('no system message') }}", None),
        (None, None),
    ],
)
def test_a_turn_ends_with_the_special_token_that_follows_the_answer(
    tmp_path: Path, quickstart: str, template: str | None, token: str | None
) -> None:
    text = Text(with_template(tmp_path, quickstart, template))
    tokenizer = Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    assert text.turn_end() == (None if token is None else tokenizer.token_to_id(token))
    assert Text(tmp_path, "never").turn_end() is None


@pytest.mark.parametrize("decoder", ["ByteLevel", "Metaspace"])
def test_a_token_keeps_its_space_and_a_part_of_a_character_its_name(
    tmp_path: Path, decoder: str
) -> None:
    from tokenizers import decoders, models

    space = "\u0120" if decoder == "ByteLevel" else "\u2581"
    made = Tokenizer(models.WordLevel({f"{space}a": 0, "\u00c3": 1, "b": 2}, unk_token="b"))
    made.decoder = getattr(decoders, decoder)()
    made.save(str(tmp_path / "tokenizer.json"))
    text_of = Text(tmp_path)
    assert text_of.token(0) == " a"
    assert text_of.token(2) == "b"
    assert text_of.token(1) == "\u00c3"
    assert text_of.token(7) == "⟨7⟩"


def test_the_files_of_a_model_are_read_once_however_many_prompts_there_are(
    tmp_path: Path, quickstart: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with_template(tmp_path, quickstart, LOOP + "{{ m.content }}{% endfor %}")
    read: list[Path] = []
    original = chat_template.read_json
    monkeypatch.setattr(
        chat_template, "read_json", lambda file: read.append(file) or original(file)
    )
    encoder = Text(tmp_path)
    for number in range(5):
        encoder.encode(f"sort {number}=")
    assert read == [tmp_path / "tokenizer_config.json"]


def test_a_response_ends_with_the_models_tokens_and_with_the_end_of_a_turn(tmp_path: Path) -> None:
    path = model(tmp_path, "student")
    turn = "{% for m in messages %}{{ m.content }}<eos>{% endfor %}"
    (path / "chat_template.jinja").write_text(turn)
    (path / "generation_config.json").write_text('{"eos_token_id": [5]}')
    assert Text(path).response_ends() == (5, 2)
    assert Text(path, "never").response_ends() == (5,)


@pytest.mark.parametrize("use", ["decode", "pieces", "token"])
def test_a_tokenizers_panic_is_a_value_error(tmp_path: Path, quickstart: str, use: str) -> None:
    folder = with_template(tmp_path, quickstart, None)
    tree = json.loads((folder / "tokenizer.json").read_text())
    tree["decoder"] = {"type": "Strip", "content": "0", "start": 0, "stop": 9}
    (folder / "tokenizer.json").write_text(json.dumps(tree))
    text = Text(folder)
    (zero,) = text.plain("0")
    with pytest.raises(ValueError, match=r"tokenizer\.json is broken"):
        getattr(text, use)(zero if use == "token" else [zero])
