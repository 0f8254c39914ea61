"""The live view in a narrow and in a wide terminal."""

from __future__ import annotations

import io
import re
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.cells import cell_len
from rich.console import Console

from async_opd.observability.live.display import Display, fit
from async_opd.observability.live.view_state import BLOCKS, EIGHTHS, ViewState
from async_opd.waiting.waits import WAITING
from tests.observability.live.test_console import METRICS, config, row
from tests.observability.test_run_log import Clock

WIDTHS = pytest.mark.parametrize("width", [80, 200])
WAIT = "scored samples of whole groups of a batch that is not complete"
MESSAGE = "teacher/math/replica/0 is ejected: the engine did not answer a heartbeat within 30 s, "


@pytest.fixture
def state() -> ViewState:
    return ViewState(config(), Clock())


def lines(state: ViewState, width: int = 80, height: int = 30) -> list[str]:
    """The view as a terminal of this size shows it."""
    console = Console(file=io.StringIO(), width=width, height=height, record=True, markup=False)
    console.print(Display(state))
    return [line.rstrip() for line in console.export_text().splitlines()]


def shown(state: ViewState, **size: int) -> str:
    return "\n".join(lines(state, **size))


def busy(state: ViewState) -> ViewState:
    """The state with everything that can be too long."""
    for step in range(1, 60):
        state.post(step, METRICS | {"loss/total": 1 / step})
    state.post(60, {f"eval/{source}/accuracy": 0.5 for source in ("a" * 40, "code", "lean")})
    state.post_waits({"rollout": WAIT, "teacher/math": "rollouts"})
    for number in range(9):
        state.post_message(f"{MESSAGE * 3}{number}")
    return state


@WIDTHS
def test_a_pool_is_one_line_of_busy_share_speed_requests_in_flight_and_what_it_waits_for(
    state: ViewState, width: int
) -> None:
    state.post(1, METRICS | {"rollout/in_flight": 64.0})
    state.post_waits({"rollout": "prompts (admission)"})
    text = re.sub(f"[{BLOCKS}{EIGHTHS[1:]}]", "", shown(state, width=width))
    assert row(text, "rollout") == ["rollout", "97%", "12.3k", "64", "prompts", "(admission)"]
    assert row(text, "train") == ["train", "50%", "900", "-"]
    assert row(text, "teacher/sort") == ["teacher/sort", "-", "-", "-"]  # it has not reported


@WIDTHS
def test_no_line_is_longer_than_the_terminal_and_nothing_wraps(
    state: ViewState, width: int
) -> None:
    found = lines(busy(state), width)
    assert max(map(cell_len, found)) <= width
    assert [line.split()[0] for line in found[2:6]] == [pool.name for pool in state.pools]
    assert sum(line.startswith("teacher/math/replica/0") for line in found) == 5
    assert len(found) <= 29
    words = {*MESSAGE.split(), *WAIT.split(), *(str(number) for number in range(9)), "…"}
    for line in found:  # no text is cut within a word
        if line.startswith("teacher/math/replica/0"):
            assert set(line.split()) <= words
        if line.startswith("rollout "):
            assert set(line.split()[-3:]) <= words


def test_a_wide_terminal_shows_the_past_of_each_pool_too(state: ViewState) -> None:
    for step in range(1, 9):
        state.post(step, {"train/busy": step / 8, "train/tokens_per_s": 9.0 - step})
    assert "▁▂▃▄▅▆▇█" in shown(state, width=200)
    assert "█▇▆▅▄▃▂▁" in shown(state, width=200)
    assert "▁▂▃▄▅▆▇█" not in shown(state, width=80)


@pytest.mark.parametrize("height", [10, 16, 24])
def test_a_low_terminal_keeps_pools_and_messages(state: ViewState, height: int) -> None:
    found = lines(busy(state), 80, height)
    assert len(found) <= height - 1
    assert any(line.startswith("train ") for line in found)
    assert found[-1].startswith("teacher/math/replica/0")


def test_many_teachers_leave_room_for_what_goes_wrong() -> None:
    many = config()
    teachers = {f"t{number}": many.teachers["math"] for number in range(40)}
    state = busy(ViewState(many.model_copy(update={"teachers": teachers}), Clock()))
    found = lines(state)
    assert len(found) <= 29
    assert found[-1].startswith("teacher/math/replica/0")
    assert any("more pools" in line for line in found)


def test_a_topic_has_a_bar_and_its_ready_and_leased_samples(state: ViewState) -> None:
    state.topic_samples = 18
    state.post(1, METRICS)
    assert row(shown(state), "rollouts/sort")[:5] == ["rollouts/sort", "█████", "7", "+", "2"]
    state.post(2, {"queue/dead/ready": 0.0, "queue/stale/ready": 3.0})
    assert "stale" in shown(state)  # shown when it has samples
    assert "dead " not in shown(state)


def test_the_view_has_the_numbers_of_training_and_their_curves(state: ViewState) -> None:
    for loss in (8.0, 4.0, 1.0):
        state.post(1, METRICS | {"loss/total": loss})
    text = shown(state)
    assert row(text, "loss")[:3] == ["loss", "█▄▁", "1"]
    assert "lr 1e-05  version 3  staleness max 2" in text


def test_the_view_has_the_newest_accuracy_of_each_source(state: ViewState) -> None:
    state.post(0, {"eval_initial/sort/accuracy": 0.1, "eval_initial/math/accuracy": 0.2})
    state.post(1, METRICS)
    words = " ".join(shown(state).split())
    assert "accuracy sort ▁█ 62.5%" in words
    assert "accuracy math ▁ 20.0%" in words


def test_the_view_has_the_last_messages(state: ViewState) -> None:
    assert "step 0/100" in shown(state)  # before anything happened
    for number in range(9):
        state.post_message(f"message {number}")
    state.post_message("[red]not markup[/red]")
    text = shown(state)
    assert "message 8" in text
    assert "message 3" not in text
    assert "[red]not markup[/red]" in text
    for seconds in range(10, 100, 10):
        state.post_message(f"{WAITING}student/0 to start ({seconds} s so far, at most 600 s)")
    newest = f"{WAITING}student/0 to start (90 s so far, at most 600 s)"
    assert state.messages[-2:] == ("[red]not markup[/red]", newest)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -1e308, 1e308])
def test_values_that_no_curve_can_show_are_shown(state: ViewState, value: float) -> None:
    for sign in (1, -1):
        state.post(1, dict.fromkeys(METRICS, sign * value))
    assert "loss" in shown(state)


@given(st.text(), st.integers(1, 60))
def test_a_text_that_is_fit_is_not_longer_and_one_line(text: str, width: int) -> None:
    found = fit(text, width)
    assert cell_len(found) <= width
    assert "\n" not in found


@given(st.lists(st.text("abc", min_size=1), min_size=1), st.integers(8, 60))
def test_a_text_that_is_fit_keeps_whole_words(words: list[str], width: int) -> None:
    words = [word[: width - 2] for word in words]
    kept: list[Any] = fit(" ".join(words), width).split()
    if kept[-1] == "…":
        kept.pop()
    assert kept == words[: len(kept)]
