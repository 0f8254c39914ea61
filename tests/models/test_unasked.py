"""No question to the user: the process for good, a thread while it loads a model."""

from __future__ import annotations

import io
import logging
import sys
import threading
from types import ModuleType

import pytest
from huggingface_hub import constants

from async_opd.models.unasked import ASKS, never_ask, without_hub


def offline_in_another_thread() -> bool:
    found: list[bool] = []
    thread = threading.Thread(target=lambda: found.append(constants.is_offline_mode()))
    thread.start()
    thread.join(60)
    return found[0]


@pytest.fixture(autouse=True)
def online(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)


def test_the_thread_that_loads_a_model_asks_no_hub_and_others_may() -> None:
    with without_hub(trusted=False):
        assert constants.is_offline_mode()
        assert not offline_in_another_thread()
    assert not constants.is_offline_mode()


def test_with_trusted_code_it_may_ask_unless_offline(monkeypatch: pytest.MonkeyPatch) -> None:
    with without_hub(trusted=True):
        assert not constants.is_offline_mode()
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    with without_hub(trusted=True):
        assert constants.is_offline_mode()


def test_a_process_that_has_imported_transformers_already_asks_nothing_either(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    imported = ModuleType(ASKS)
    monkeypatch.setattr(imported, "TIME_OUT_REMOTE_CODE", 15, raising=False)
    monkeypatch.setitem(sys.modules, ASKS, imported)
    never_ask()
    assert vars(imported)["TIME_OUT_REMOTE_CODE"] == 0


@pytest.mark.parametrize("name", ["transformers.models.m", "transformers"])
def test_a_log_line_of_transformers_commands_no_terminal_and_forges_no_line(
    monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    never_ask()
    shown = io.StringIO()
    handler = logging.StreamHandler(shown)
    monkeypatch.setattr(logging.getLogger("transformers"), "handlers", [handler])
    logging.getLogger(name).error("factor %s", "\x1b[2J\nstep 7")
    assert shown.getvalue() == "factor \\x1b[2J\n    step 7\n"
