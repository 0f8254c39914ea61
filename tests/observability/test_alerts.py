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
        ("completed", None),
        ("everything is up after 3 s", None),
        ("interrupted", None),
        ("wandb failed: a timeout (the run ", None),
        ("teacher a/1 is being rebuilt", None),
        ("teacher a/1 is rebuilt", None),
        ("trainer: see below\n  failed: something", None),  # a quoted line of an engine
    ],
)
def test_a_message_that_somebody_should_act_upon_is_an_alert(text: str, title: str | None) -> None:
    found = alert_of(text)
    assert (found and (found.title, found.text)) == (title and (title, text))
