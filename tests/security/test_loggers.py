"""Prompts, answers and pictures that loggers receive: none where the config says so."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from async_opd.observability.run_log import RunLog
from tests.observability.test_wandb_images import write_samples
from tests.observability.test_wandb_sink import FakeRun, config

ANSWER = "the answer of a patient"


@pytest.mark.parametrize("samples", [True, False])
def test_wandb_gets_no_text_and_no_picture_of_a_sample_without_log_samples(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, samples: bool
) -> None:
    import wandb

    given, alerts = FakeRun(), list[str]()
    given.alert = lambda text, **_: alerts.append(text)  # type: ignore[method-assign]
    monkeypatch.setattr(wandb, "init", lambda **_: given)
    write_samples(tmp_path)
    asked = config()
    log = asked.log.model_copy(update={"samples": samples})
    with RunLog(asked.model_copy(update={"log": log}), tmp_path) as run_log:
        run_log.log(1, {"loss/total": 2.5})
        run_log.log(2, {"eval/sort/accuracy": 0.5})
        run_log.finish("failed", f"the grader failed on {ANSWER}")
    rows: list[dict[str, Any]] = [row for _, row in given.rows]
    assert [len(row) for row in rows if "step" in row] != []
    others = {
        key for row in rows for key, value in row.items() if not isinstance(value, int | float)
    }
    assert others == ({"evaluation/samples", "generations/samples"} if samples else set())
    assert [ANSWER in text for text in alerts] == [samples]
    assert ANSWER not in str(given.summary)
    assert ANSWER in json.loads((tmp_path / "summary.json").read_text())["error"]
    assert list((tmp_path / "media").rglob("*.*"))
