"""Which messages are alerts."""

from __future__ import annotations

import pytest

from async_opd.observability.wandb_sink import alert_of


@pytest.mark.parametrize(
    ("text", "title"),
    [
        ("step 7: 90% of the responses are cut off (guardrail: 0.5)", "guardrail"),
        ("rollback 1 of at most 3", "guardrail"),
        ("student/0 is ejected: its process died", "a replica failed"),
        ("teacher a/1 is gone for good: it died again", "a replica failed"),
        ("failed: rollouter: its process died", "the run has failed"),
    ],
)
def test_what_somebody_should_act_upon_is_an_alert(text: str, title: str) -> None:
    found = alert_of(text)
    assert found is not None
    assert (found.title, found.text) == (title, text)


@pytest.mark.parametrize(
    "text",
    [
        "completed",
        "everything is up after 3 s",
        "interrupted",
        "wandb failed: a timeout (the run ",
        "teacher a/1 is being rebuilt",
        "teacher a/1 is rebuilt",
    ],
)
def test_other_messages_are_none(text: str) -> None:
    assert alert_of(text) is None


def test_a_quoted_line_of_an_engine_is_no_alert_of_its_own() -> None:
    assert alert_of("trainer: see below\n  failed: something") is None
