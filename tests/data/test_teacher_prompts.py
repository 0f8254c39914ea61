"""Each teacher's prompt for a row, and the first token in which it differs from the student's."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from async_opd.core.row import Row
from async_opd.data.teacher_prompts import (
    Difference,
    TeacherPrompt,
    first_difference,
    prompts_as_read,
    teacher_readers,
)
from async_opd.models.tokenizer import Text
from tests.checks.inputs import config, model

TURNS = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"
BEGIN = "{% if add_generation_prompt %}<assistant>{% endif %}"
ROW = Row("0:0", "sort", "sort 21=", "12", {"prompt": "sort 21=", "answer": "12"})


def with_template(folder: Path, name: str, template: str) -> str:
    path = model(folder, name)
    (path / "chat_template.jinja").write_text(template)
    key = "student" if name == "student" else f"teachers.{name.partition('-')[2]}"
    return f"{key}.model={path}"


def seen(*overrides: str) -> dict[str, str]:
    """The row's prompt as each reader reads it."""
    made = config(*overrides)
    return {one.reader: "".join(one.pieces) for one in prompts_as_read(made, Text.of(made), ROW)}


def test_a_teacher_without_settings_reads_what_the_student_reads(tmp_path: Path) -> None:
    student = with_template(tmp_path, "student", TURNS + BEGIN)
    made = config(student)
    assert teacher_readers(made, Text.of(made)) == {}
    assert seen(student) == dict.fromkeys(("student", "sort"), "<user>sort 21=<assistant>")
    (tmp_path / "own.jinja").write_text("({{ messages[0].content }})")
    read = seen(f"student.chat_template_file={tmp_path}/own.jinja")
    assert read == dict.fromkeys(("student", "sort"), "(sort 21=)")


def test_a_teacher_reads_its_own_template_and_scores_after_the_same_thought(tmp_path: Path) -> None:
    student = with_template(tmp_path, "student", TURNS + BEGIN + "{{ begin }}")
    teacher = with_template(
        tmp_path, "teacher-sort", TURNS.replace("<", "[").replace(">", "]") + BEGIN + "<think>"
    )
    read = seen(student, teacher, "teachers.sort.own_template=true")
    assert read == {"student": "<user>sort 21=<assistant>", "sort": "[user]sort 21=<assistant>"}
    filled = "teachers.sort.prompt_template='{prompt} {answer}'"
    read = seen(student, teacher, "teachers.sort.own_template=true", filled)
    assert read["sort"] == "[user]sort 21= 12<assistant>"


def test_variables_and_system_prompts_are_the_students_or_the_teachers(tmp_path: Path) -> None:
    student = with_template(tmp_path, "student", TURNS + "{{ hint }}")
    own = [student, "student.chat_template_kwargs={hint: A}", "student.system_prompt=be"]
    assert seen(*own)["sort"] == "<system>be<user>sort 21=A"
    assert seen(*own, "teachers.sort.system_prompt=do")["sort"] == "<system>do<user>sort 21=A"
    other = "teachers.sort.chat_template_kwargs={hint: B}"
    assert seen(*own, other) == {
        "student": "<system>be<user>sort 21=A", "sort": "<system>be<user>sort 21=B",
    }  # fmt: skip


def prompt(text: str) -> TeacherPrompt:
    return TeacherPrompt("x", tuple(map(ord, text)), tuple(text))


@pytest.mark.parametrize(
    ("student", "teacher", "difference"),
    [
        ("abc", "abc", None),
        ("abcd", "axcd", Difference(1, "b", "x", 2)),
        ("ab", "abab", Difference(2, None, "a", 0)),
        ("abx", "ab", Difference(2, "x", None, 0)),
    ],
)
def test_the_first_difference_is_shown(
    student: str, teacher: str, difference: Difference | None
) -> None:
    assert first_difference(prompt(student), prompt(teacher)) == difference


@given(st.text("ab", max_size=6), st.text("ab", max_size=6))
def test_prompts_are_equal_before_the_first_difference_and_in_their_ends(a: str, b: str) -> None:
    found = first_difference(prompt(a), prompt(b))
    assert (found is None) == (a == b)
    if found is not None:
        assert a[: found.at] == b[: found.at]
        assert a[found.at : found.at + 1] != b[found.at : found.at + 1]
        assert a[len(a) - found.end :] == b[len(b) - found.end :]
