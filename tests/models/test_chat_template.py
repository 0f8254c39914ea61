"""Responses follow the teacher's prompt as they follow the student's: thoughts open or closed."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from async_opd.models.chat_template import ChatTemplate, aligned_prefix

TURNS = "{% for m in messages %}<{{ m.role }}>{{ m.content }}\n{% endfor %}"
OPEN, CLOSED = "<think>\n", "<think>\n\n</think>\n\n"
THINKING = "{% if enable_thinking is defined and not enable_thinking %}<think></think>{% endif %}"


def chat(
    begun: str, values: dict[str, object] | None = None, prefix: str | None = None
) -> ChatTemplate:
    """A template whose generation prompt ends with this."""
    made = ChatTemplate(Path("/none"), None, values or {}, prefix=prefix)
    generation = "{% if add_generation_prompt %}<assistant>" + begun + "{% endif %}"
    made.__dict__["text"] = TURNS + generation.replace("\n", "{{ '\\n' }}")
    made.__dict__["named"] = {}
    return made


def end(template: ChatTemplate) -> str:
    """The text after the header of the assistant's turn."""
    return template.render([{"role": "user", "content": "x"}]).rpartition("<assistant>")[2]


@pytest.mark.parametrize(
    ("student", "teacher", "expected"),
    [
        pytest.param("", "", "", id="neither thinks"),
        pytest.param("", OPEN, "", id="the student writes the beginning of its thought itself"),
        pytest.param(OPEN, "", OPEN, id="the teacher would write it itself"),
        pytest.param(OPEN, "<think>", OPEN, id="both think, in other spellings"),
        pytest.param(CLOSED, OPEN, CLOSED, id="the student does not think"),
        pytest.param("", CLOSED, CLOSED, id="only the teacher has to be told not to think"),
        pytest.param(CLOSED, "", "", id="the teacher knows no thoughts"),
        pytest.param(CLOSED, THINKING, CLOSED, id="the teacher thinks unless its prompt says no"),
    ],
)
def test_a_response_continues_one_thought_for_both(
    student: str, teacher: str, expected: str
) -> None:
    own = chat(student)
    made = chat(teacher, prefix=aligned_prefix(own, chat(teacher)))
    assert end(made) == expected


def test_what_the_students_prompt_adds_is_added_to_the_teachers() -> None:
    assert aligned_prefix(chat(OPEN, prefix="Answer:"), chat("")) == "Answer:"
    assert end(chat(OPEN, prefix="Answer:")) == "Answer:"


def test_a_beginning_that_only_the_teachers_or_some_prompts_have_is_refused() -> None:
    with pytest.raises(ValueError, match="continues the thought"):
        aligned_prefix(chat(OPEN), chat(CLOSED))
    begun = "{% if messages | length == 1 %}<think>{% endif %}"
    made = chat(begun, prefix="")
    with pytest.raises(ValueError, match="does not end this prompt"):
        made.render([{"role": "user", "content": "x"}] * 2)


thoughts = st.sampled_from(["", OPEN, CLOSED, "<think>", "[THINK]", "[THINK][/THINK]"])


@given(thoughts, thoughts)
def test_a_teacher_reads_open_thoughts_where_the_student_does(student: str, teacher: str) -> None:
    own, other = chat(student), chat(teacher)
    is_open = bool(student) and "/" not in student
    try:
        made = end(chat(teacher, prefix=aligned_prefix(own, other)))
    except ValueError:
        assert is_open
        assert "/" in teacher
        return
    assert (bool(made) and "/" not in made) == is_open
    assert made == student or not is_open


def test_a_system_prompt_comes_in_place_of_the_rows_own() -> None:
    made = ChatTemplate(Path("/none"), system="S")
    user = {"role": "user", "content": "x"}
    expected = [{"role": "system", "content": "S"}, user]
    assert made.with_system([user]) == expected
    assert made.with_system([{"role": "system", "content": "own"}, user]) == expected


@pytest.mark.parametrize(
    ("name", "cause"),
    [
        ("/dev/zero", "is not a regular file"),
        ("pipe", "is not a regular file"),
        ("long", "has more than 1048576 characters"),
    ],
)
def test_a_template_is_read_of_a_regular_file_of_at_most_a_mebi_of_characters(
    name: str, cause: str, tmp_path: Path
) -> None:
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "long").write_text("x" * ((1 << 20) + 1))
    with pytest.raises(OSError, match=cause):
        _ = ChatTemplate(tmp_path, tmp_path / name).text
