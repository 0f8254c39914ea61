"""Settings of chat templates without effect, or with a wrong one, are refused with a remedy."""

from __future__ import annotations

from pathlib import Path

import pytest

from async_opd.checks.templates import check_turns
from async_opd.core.errors import Findings
from async_opd.data.teacher_prompts import teacher_readers
from async_opd.models.tokenizer import Text
from tests.checks.inputs import config, found, model

TURNS = "{% for m in messages %}<{{ m.role }}>{{ m.content }}<eos>{% endfor %}"
THINKS = "{% if enable_thinking %}<think>{% else %}<think></think>{% endif %}"


@pytest.fixture
def student(tmp_path: Path) -> str:
    path = model(tmp_path, "student")
    (path / "chat_template.jinja").write_text(
        TURNS + "{% if add_generation_prompt %}" + THINKS + "{% endif %}"
    )
    return f"student.model={path}"


def test_settings_that_the_template_reads_are_taken(student: str) -> None:
    kwargs = "student.chat_template_kwargs={enable_thinking: true}"
    assert found(student, kwargs, "student.system_prompt=be brief") == []


@pytest.mark.parametrize(
    ("override", "key", "words"),
    [
        ("student.chat_template_kwargs={thinking: 1}", "student.chat_template_kwargs", "not read"),
        ("student.chat_template_kwargs={tools: []}", "student.chat_template_kwargs", "not read"),
        ("student.chat_template_kwargs={messages: []}", "student.chat_template_kwargs", "sets"),
        ("student.chat_template_file=/no/such", "student.chat_template_file", "cannot be read"),
        ("teachers.sort.chat_template_file=/no", "teachers.sort.chat_template_file", "cannot be"),
        ("teachers.sort.own_template=true", "teachers.sort.own_template", "has none"),
    ],
)
def test_settings_without_effect_are_refused(
    student: str, override: str, key: str, words: str
) -> None:
    (problem,) = found(student, override)
    assert (problem.key, words in problem.message) == (key, True)
    assert problem.remedy


@pytest.mark.parametrize("name", ["system_prompt=be brief", "response_prefix=x"])
def test_settings_for_prompts_without_a_template_are_refused(student: str, name: str) -> None:
    (plain,) = found(f"student.{name}")
    (never,) = found(student, "data.chat_template=never", f"student.{name}")
    assert {plain.key, never.key} == {f"student.{name.partition('=')[0]}"}


def test_a_file_that_is_no_template_is_refused_with_its_place(tmp_path: Path) -> None:
    (tmp_path / "broken.jinja").write_text("{% if %}")
    (problem,) = found(f"student.chat_template_file={tmp_path}/broken.jinja")
    assert (problem.key, "broken.jinja" in problem.message) == ("student.chat_template_file", True)


def test_a_teacher_that_ends_the_thought_of_the_response_is_refused(student: str) -> None:
    think = "student.chat_template_kwargs={enable_thinking: true}"
    teacher = "teachers.sort.chat_template_kwargs={enable_thinking: false}"
    (problem,) = found(student, think, teacher)
    assert problem.key == "teachers.sort"
    assert "continues the thought '<think>'" in problem.message
    assert "enable_thinking" in problem.remedy
    assert found(student, think, teacher, "teachers.sort.response_prefix=<think>") == []


def test_a_server_without_a_model_has_no_template_of_its_own(student: str) -> None:
    server = (
        "teachers.sort={kind: endpoint, urls: ['http://a'], served_model: m, own_template: true}"
    )
    assert "teachers.sort.own_template" in {problem.key for problem in found(student, server)}


SERVER = "{kind: endpoint, urls: ['http://a'], served_model: m, own_template: true"


def test_a_servers_own_template_is_not_read_in_the_working_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, student: str
) -> None:
    (tmp_path / "m").mkdir()
    (tmp_path / "m" / "chat_template.jinja").write_text("theirs")
    monkeypatch.chdir(tmp_path)
    given = config(student, f"teachers.sort={SERVER}}}")
    with pytest.raises(ValueError, match=r"set teachers\.sort\.model"):
        teacher_readers(given, Text.of(given))


def test_a_servers_own_template_is_that_of_its_model(tmp_path: Path, student: str) -> None:
    teacher = model(tmp_path, "teacher-sort")
    (teacher / "chat_template.jinja").write_text("its own")
    given = config(student, f"teachers.sort={SERVER}, model: {teacher}}}")
    assert Text.of(given).chat_of_teacher(given, "sort").text == "its own"


def test_check_notes_what_each_roles_template_does_with_turns(student: str) -> None:
    notes = Findings("c.yaml")
    system = "teachers.sort.system_prompt=be brief"
    check_turns(config(student, system), "append", False, notes)
    assert notes.problems == []
    assert [note.split(":")[0] for note in notes.notes] == ["student", "teachers.sort"]
    assert "user turn after an answer: changed" in notes.notes[0]  # <think></think> is begun only
    assert "tool result after a call: not shown" in notes.notes[0]


def test_an_environment_whose_tools_the_template_cannot_show_is_refused(student: str) -> None:
    notes = Findings("c.yaml")
    check_turns(config(student), "append", True, notes)
    (problem,) = notes.problems
    assert problem.key == "environment"
    assert "does not show tools" in problem.message
    assert "student.chat_template_file" in problem.remedy


def test_an_environment_without_a_chat_template_is_refused() -> None:
    notes = Findings("c.yaml")
    check_turns(config(), "append", False, notes)
    assert [problem.key for problem in notes.problems] == ["environment"]
    assert notes.notes == []
