"""The doctor shows where a teacher's prompts first differ, and templates that no run uses."""

from __future__ import annotations

from pathlib import Path

from async_opd.tools.doctor.examination import examine
from async_opd.tools.doctor.finding import Finding
from tests.checks.inputs import config, model

PLAIN = "{% for m in messages %}{{ m.content }}{% endfor %}"


def templates(*overrides: str) -> dict[str, Finding]:
    """Findings about templates that are not ok, by teacher."""
    found = examine(config(*overrides), "c.yaml", 1, environment=list).findings
    lines = [one for one in found if one.topic == "templates" and one.status != "ok"]
    return {one.found.partition(":")[0]: one for one in lines}


def with_template(tmp_path: Path, name: str, template: str) -> Path:
    path = model(tmp_path, name)
    (path / "chat_template.jinja").write_text(template)
    return path


def test_prompts_without_a_template_are_equal_for_all() -> None:
    assert templates() == {}


def test_a_teachers_own_template_that_the_run_does_not_use_is_shown_at_its_first_token(
    tmp_path: Path,
) -> None:
    student = with_template(tmp_path, "student", PLAIN)
    teacher = with_template(tmp_path, "teacher-sort", "x" + PLAIN)
    found = templates(f"student.model={student}", f"teachers.sort.model={teacher}")
    assert set(found) == {"teachers.sort"}
    line = found["teachers.sort"]
    assert (line.status, "from token 1 on the run has 's', it has 'x'" in line.found) == (
        "warning",
        True,
    )
    assert "teachers.sort.own_template to true" in line.remedy


def test_a_teacher_with_the_students_template_has_no_difference(tmp_path: Path) -> None:
    student = with_template(tmp_path, "student", PLAIN)
    teacher = with_template(tmp_path, "teacher-sort", PLAIN)
    assert templates(f"student.model={student}", f"teachers.sort.model={teacher}") == {}


def test_a_teacher_that_reads_its_own_template_as_configured_is_no_fault(tmp_path: Path) -> None:
    student = with_template(tmp_path, "student", PLAIN)
    teacher = with_template(tmp_path, "teacher-sort", "x" + PLAIN)
    paths = (f"student.model={student}", f"teachers.sort.model={teacher}")
    assert templates(*paths, "teachers.sort.own_template=true") == {}


def test_a_configured_prompt_that_ends_otherwise_is_a_warning(tmp_path: Path) -> None:
    found = templates("teachers.sort.prompt_template='{prompt}1'")
    assert "the response follows other tokens" in found["teachers.sort"].remedy
