"""Processes are ended although Ray's head does not answer: nothing waits for it without end."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import ray

from async_opd.cluster import remote
from async_opd.cluster.remote import Remote


@pytest.mark.parametrize("end", [Remote.kill, Remote.restart])
def test_a_lost_head_is_not_waited_for(end: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    asked, answers = threading.Event(), threading.Event()

    def kill(handle: Any, no_restart: bool = True) -> None:
        asked.set()
        answers.wait(60)

    monkeypatch.setattr(ray, "kill", kill)
    monkeypatch.setattr(remote, "CONFIRM_S", 0.01)
    end(Remote("student/0", None, 5))
    assert asked.wait(60)
    answers.set()
    monkeypatch.setattr(ray, "kill", lambda *_, **__: {}["not an actor"])
    if end is Remote.kill:  # an error of Ray is raised
        with pytest.raises(KeyError, match="not an actor"):
            end(Remote("student/0", None, 5))
