"""A chat template that writes the date into prompts writes one date for the whole run."""

from __future__ import annotations

from pathlib import Path

import pytest

from async_opd.config.load import dump_config
from async_opd.config.run_config import RunConfig
from async_opd.core.errors import ConfigError
from async_opd.core.row import Row
from async_opd.data import template_date
from async_opd.models.tokenizer import Text
from async_opd.prepare import prepare
from tests.checks.inputs import config as config_of
from tests.checks.inputs import rows

DAYS = "{{ '1' * strftime_now('%d') | int }}{% for m in messages %}{{ m.content }}{% endfor %}"
"""Renders a prompt with as many more tokens as the day of the month has."""
ENTRIES = [
    {"prompt": prompt, "data_source": source}
    for prompt in ("1", "1" * 12)
    for source in ("sort", "reverse")
]


@pytest.fixture
def dated(tmp_path: Path) -> RunConfig:
    (tmp_path / "dated.jinja").write_text(DAYS)
    run = tmp_path / "run"
    return config_of(
        rows(tmp_path, *ENTRIES),
        "data.eval=[]",
        "data.max_prompt_tokens=20",
        "data.overlong=filter",
        "cluster.device=cpu",
        f"student.chat_template_file={tmp_path / 'dated.jinja'}",
        f"run_dir={run}",
    )


def on(monkeypatch: pytest.MonkeyPatch, day: str) -> None:
    class Day(template_date.date):
        @classmethod
        def today(cls) -> template_date.date:
            return cls.fromisoformat(day)

    monkeypatch.setattr(template_date, "date", Day)


def begun(dated: RunConfig) -> tuple[RunConfig, list[list[str]]]:
    """The files of the run's first part in its directory, and the rows that it keeps."""
    made = prepare(dated, "c.yaml")
    assert dated.run_dir is not None
    Path(dated.run_dir).mkdir()
    (Path(dated.run_dir) / "config.yaml").write_text(dump_config(made.config))
    return made.config, prompts(made.inputs.checked)


def prompts(checked: object) -> list[list[str]]:
    assert isinstance(checked, list)
    return [[row.prompt for row in part if isinstance(row, Row)] for part in checked]


def test_a_run_resumed_on_another_day_keeps_its_rows_and_renders_the_same_prompts(
    dated: RunConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    on(monkeypatch, "2026-11-03")
    first, kept = begun(dated)
    assert len(kept[0]) == 4
    on(monkeypatch, "2026-11-12")
    again = prepare(dated, "c.yaml", resume=True)
    assert prompts(again.inputs.checked) == kept
    assert Text.of(again.config).encode("1") == Text.of(first).encode("1")
    assert again.config == first
    other = prepare(dated, "c.yaml")
    assert prompts(other.inputs.checked) != kept  # without the run's date


def test_teachers_templates_have_the_runs_date(
    dated: RunConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = dated.student.chat_template_file
    on(monkeypatch, "2026-11-03")
    plain = dated.model_copy(
        update={
            "student": dated.student.model_copy(update={"chat_template_file": None}),
            "teachers": {
                name: teacher.model_copy(update={"chat_template_file": file})
                for name, teacher in dated.teachers.items()
            },
        }
    )
    made = template_date.with_template_date(plain)
    text = Text.of(made)
    assert text.of_teacher(made, "sort").chat.render([]) == "111"


def test_without_a_date_in_templates_or_earlier_versions_there_is_none(dated: RunConfig) -> None:
    made = config_of()
    assert template_date.with_template_date(made) is made
    assert dated.run_dir is not None
    Path(dated.run_dir).mkdir()
    (Path(dated.run_dir) / "config.yaml").write_text(dump_config(dated))
    assert template_date.with_template_date(dated, resume=True).data.template_date is None


@pytest.mark.parametrize("value", ["today", "2026-13-01", "20261122"])
def test_what_is_no_date_is_refused(value: str) -> None:
    with pytest.raises(ConfigError, match=r"data\.template_date"):
        config_of(f"data.template_date='{value}'")
