"""The prompts of a probe: which rows, and as which models read them."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from async_opd.checks.preflight import preflight
from async_opd.models.tokenizer import Text
from async_opd.tools.probe.asked import AskedSource, asked_sources
from tests.checks.inputs import config, rows
from tests.tools.doctor.test_templates import PLAIN, with_template


def asked(tmp_path: Path, *overrides: str, count: int = 9) -> dict[str, AskedSource]:
    """The requests of each source."""
    made = config(*overrides)
    found = asked_sources(made, preflight(made, "c.yaml"), Text.of(made), count, tmp_path)
    return {one.source: one for one in found}


def test_every_source_is_asked_with_its_teacher(tmp_path: Path) -> None:
    found = asked(tmp_path)
    assert {one.source: one.teacher for one in found.values()} == {
        "sort": "sort",
        "reverse": "reverse",
    }
    assert all(len(one.asked.prompts) == 3 and one.asked.grade for one in found.values())


def test_prompts_are_chosen_by_the_seed(tmp_path: Path) -> None:
    def chosen(seed: int) -> list[str]:
        return [one.uid for one in asked(tmp_path, f"seed={seed}")["sort"].asked.prompts]

    assert chosen(1) == chosen(1)
    assert len({tuple(chosen(seed)) for seed in range(8)}) > 1


def test_prompts_that_do_not_fit_are_left_out(tmp_path: Path) -> None:
    wide = {"prompt": "sort 1=" + 200 * "1", "data_source": "sort", "answer": "1"}
    few = {"prompt": "sort 21=", "data_source": "sort", "answer": "12"}
    data = rows(tmp_path, wide, few, {**few, "data_source": "reverse"})
    found = asked(tmp_path, data, "data.overlong=filter")["sort"]
    assert [len(one.token_ids) for one in found.asked.prompts] == [8]


def test_a_teachers_own_template_is_asked_beside_the_runs(tmp_path: Path) -> None:
    student = with_template(tmp_path, "student", PLAIN)
    teacher = with_template(tmp_path, "teacher-sort", "x" + PLAIN)
    found = asked(tmp_path, f"student.model={student}", f"teachers.sort.model={teacher}")
    other = found["sort"].asked.other
    assert other is not None
    for run, own in zip(found["sort"].asked.prompts, other, strict=True):
        assert own.token_ids is run.token_ids
        assert own.teacher_ids is not None
        assert np.array_equal(own.teacher_ids[1:], run.token_ids)
    assert found["reverse"].asked.other is None


def test_a_template_that_refuses_the_prompts_is_not_asked(tmp_path: Path) -> None:
    student = with_template(tmp_path, "student", PLAIN)
    teacher = with_template(tmp_path, "teacher-sort", "{{ raise_exception('no') }}")
    found = asked(tmp_path, f"student.model={student}", f"teachers.sort.model={teacher}")
    assert found["sort"].asked.other is None
