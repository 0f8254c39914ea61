"""The environments of examples/environments play in the processes of a run."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from async_opd.config.load import load_config
from async_opd.core.environments import AssistantMessage, Environment
from async_opd.core.row import Row
from async_opd.environments.pool import Environments, EnvironmentSpec
from tests.world.environments import call, row, spec_of

FOLDER = Path(__file__).parents[2] / "examples" / "environments"
Begin = Callable[..., Any]


@pytest.fixture
async def begin(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Begin]:
    monkeypatch.syspath_prepend(str(FOLDER))
    pools: list[Environments] = []

    async def begun(spec: EnvironmentSpec, first: Row, seed: int = 0) -> tuple[Environment, str]:
        pools.append(Environments(spec))
        episode = await pools[-1].open()
        opening = await episode.reset(first, seed)
        assert isinstance(first.prompt, str)
        return episode, opening.history(first.prompt)[-1]["content"]

    yield begun
    for pool in pools:
        pool.close()


async def test_a_class_of_trls_kind(begin: Begin) -> None:
    episode, shown = await begin(spec_of(factory="hot_and_cold:HotAndCold"), row(treasure=7))
    assert shown == "p You stand at 0."
    answers = [(await episode.step(call("walk", to=place))).messages[0] for place in (3, 9, 7)]
    assert [answer["content"] for answer in answers] == ["warmer", "warmer", "Here it is."]
    assert (await episode.step(AssistantMessage("I have it."))).done
    assert await episode.reward() == 1.0


@pytest.mark.skipif(find_spec("gymnasium") is None, reason="needs the extra environments")
async def test_frozen_lake_of_gymnasium(begin: Begin) -> None:
    config = load_config(FOLDER / "frozen_lake.yaml")
    prompt = json.loads((FOLDER / "frozen_lake.jsonl").read_text())["prompt"]
    first = Row("0:0", "large", prompt, "", {})
    episode, shown = await begin(EnvironmentSpec.of(config), first)
    assert shown.startswith(prompt)
    assert shown.endswith("\n\n[S]FFF\nFHFH\nFFFH\nHFFG")
    for move in ("down", "down", "right", "right", "down", "right"):
        outcome = await episode.step(AssistantMessage(move))
    assert (outcome.done, await episode.reward()) == (True, 1.0)


@pytest.mark.skipif(find_spec("textarena") is None, reason="needs pip install textarena")
@pytest.mark.slow
async def test_a_game_of_textarena(begin: Begin) -> None:
    spec = spec_of(factory="text_arena:TextArena", kwargs={"game": "GuessTheNumber-v0"})
    episode, shown = await begin(spec, row())
    assert "Guess The Number" in shown
    low, high = 1, 20
    for _ in range(5):
        guess = (low + high) // 2
        outcome = await episode.step(call("move", text=f"[{guess}]"))
        answer = outcome.messages[0]["content"]
        if "Congratulations" in answer:
            break
        higher = "higher" in answer.rpartition("\n")[2]
        low, high = (guess + 1, high) if higher else (low, guess - 1)
    assert await episode.reward() == 1.0
