"""The examples with environments: a calculator, and a game of higher or lower."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from async_opd.checks.preflight import preflight
from async_opd.config.load import load_config
from async_opd.environments.kinds import schemas_of
from async_opd.models.tokenizer import Text
from tests.cluster.test_run import Run, Running

EXAMPLES = Path(__file__).parents[2] / "examples"
NAMES = ("tools", "higher_lower")


@pytest.fixture
def environments(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """An environment of each example, by its name."""
    monkeypatch.syspath_prepend(str(EXAMPLES / "episodes"))
    for name in ("calculator", "higher_lower"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    from calculator import Calculator
    from higher_lower import HigherLower

    return {"tools": Calculator(), "higher_lower": HigherLower()}


@pytest.mark.parametrize("name", NAMES)
def test_an_example_has_no_problem(name: str) -> None:
    example = EXAMPLES / f"{name}.yaml"
    assert preflight(load_config(example), example.name, 0).problems == []


@pytest.mark.parametrize(("name", "tool"), [("tools", "calculate"), ("higher_lower", "guess")])
def test_the_description_of_the_tool_is_one_token_as_in_the_models_training(
    name: str, tool: str, environments: dict[str, Any]
) -> None:
    text = Text.of(load_config(EXAMPLES / f"{name}.yaml"))
    tools = schemas_of({tool: getattr(environments[name], tool)})
    rendered = text.chat.render([], False, tools=tools)
    assert len(text.plain(rendered)) < 10, text.plain(rendered)


def test_the_calculator_calculates_until_it_is_broken(environments: dict[str, Any]) -> None:
    calculator = environments["tools"]
    assert [calculator.calculate(one) for one in ("12 + 34", "5-7", "6 * 7")] == ["46", "-2", "42"]
    with pytest.raises(ValueError, match="no result"):
        type(calculator)(broken=True).calculate("12 + 34")


def test_a_game_is_won_with_the_number_and_lost_after_the_last_guess(
    environments: dict[str, Any],
) -> None:
    game = environments["higher_lower"]
    game.reset(number=5, guesses=3)
    assert [game.guess(one) for one in (4, 6, 5, 5)] == ["higher", "lower", "correct", "over"]
    assert game.get_reward() == 1.0
    game.reset(number=5, guesses=2)
    assert [game.guess(one) for one in (4, 6, 5)] == ["higher", "over", "over"]
    assert game.get_reward() == 0.0


@pytest.mark.engine
@pytest.mark.long
@pytest.mark.whole
@pytest.mark.parametrize("name", NAMES)
def test_the_student_learns_to_succeed_as_its_teacher_does(name: str, tmp_path: Path) -> None:
    example = EXAMPLES / f"{name}.yaml"
    config = load_config(example)
    steps = (f"train.steps={config.train.steps}", f"async.sync_steps={config.async_.sync_steps}")
    few = ("eval.every=0", "eval.max_prompts=null", "log.wandb=off")
    done = Running(tmp_path / name, *steps, *few, example=example).end(1800)
    assert done.code == 0, done.output
    before, after, teacher = (
        [
            value
            for key, value in done.summary.items()
            if key.startswith(f"{when}/") and key.endswith("/success")
        ]
        for when in ("eval_initial", "eval", "eval_teacher")
    )
    assert sum(before) <= 0.5 * sum(teacher)
    assert sum(after) >= 0.95 * sum(teacher)


@pytest.fixture(scope="module")
def few_steps(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """Four steps of the calculator's example, with real engines and processes."""
    folder = tmp_path_factory.mktemp("few") / "run"
    steps = ("train.steps=4", "train.batch_size=16", "async.sync_steps=2", "rollout.n=2")
    few = ("eval.max_prompts=8", "eval.every=0", "log.wandb=off", "async.max_version_lag=1")
    masks = "async.on_stale=mask"
    cold = "cold_start={steps: 2, answers: teacher, lr: 1e-5}"
    return Running(folder, *steps, *few, masks, cold, example=EXAMPLES / "tools.yaml").end(600)


@pytest.mark.engine
@pytest.mark.long
def test_a_run_trains_episodes_of_real_engines(few_steps: Run) -> None:
    assert few_steps.code == 0, few_steps.output
    turns = few_steps.values("episode/turns")
    assert len(turns) == 4
    assert all(1 <= one <= 4 for one in turns)
    assert sum(few_steps.values("episode/calls")) > 0
    assert len(few_steps.values("staleness/masked_tokens")) == 4
    assert few_steps.left == []


@pytest.mark.engine
@pytest.mark.long
def test_it_begins_with_episodes_of_its_teacher(few_steps: Run) -> None:
    assert len(few_steps.values("cold_start/loss")) == 2


@pytest.mark.engine
@pytest.mark.long
def test_its_teacher_succeeds_by_its_tool(few_steps: Run) -> None:
    assert few_steps.summary["eval_teacher/calculator/success"] >= 0.9
    assert few_steps.summary["eval_teacher/calculator/tool_calls"] >= 0.9


@pytest.mark.engine
@pytest.mark.long
def test_a_probe_of_real_engines_reads_all_calls_of_its_teacher() -> None:
    command = [sys.executable, "-m", "async_opd", "probe", str(EXAMPLES / "tools.yaml")]
    asked = [*command, "--prompts", "16", "--json"]
    done = subprocess.run(asked, stdout=subprocess.PIPE, timeout=900, check=True, text=True)
    (pair,) = json.loads(done.stdout)["pairs"]
    assert (pair["calls"], pair["verdict"]["kind"]) == (1.0, "will_teach")
