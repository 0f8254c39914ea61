"""Random lives of a run end with a run directory in which the oracle finds nothing wrong."""

from __future__ import annotations

import json
import shutil
import warnings
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from benchmarks.lives import live
from tests.lives.life import Life, Process
from tests.lives.oracle import violations
from tests.lives.stages import Shape
from tests.world.faults import Faults

FEW, MANY = 100, 500
"""Seeds of ``make test`` and of ``make test-long``: 28 s and 140 s of a core."""

pytestmark = pytest.mark.filterwarnings("ignore")  # of tasks that a killed process has left


@pytest.mark.slow
@pytest.mark.parametrize("first", range(0, FEW, 20))
def test_after_any_life_nothing_is_lost_trained_twice_or_of_another_way(first: int) -> None:
    assert live(range(first, first + 20))["violations"] == 0


@pytest.mark.long
def test_after_many_lives_nothing_is_lost_trained_twice_or_of_another_way() -> None:
    assert live(range(FEW, FEW + MANY))["violations"] == 0


@pytest.mark.slow
@pytest.mark.parametrize("seed", [3, 4])
def test_a_life_is_repeated_by_its_seed(seed: int, tmp_path: Path) -> None:
    ledgers = set()
    for name in ("one", "other"):
        Life.of(seed).live(tmp_path / name)
        ledgers.add((tmp_path / name / "run" / "ledger.jsonl").read_bytes())
    assert len(ledgers) == 1


# ── the oracle finds what is wrong ─────────────────────────────────────────────────────────────


@pytest.fixture(scope="module")
def lived_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a life with a signal, dead letters, evaluations and a mirror."""
    folder = tmp_path_factory.mktemp("lives") / "life"
    process = Process("signal", 300, (), 0.5, 1, None)
    life = Life(
        1,
        {
            "rollout": {"n": 2, "replicas": 2},
            "train": {"steps": 6, "batch_size": 4},
            "async": {"sync_steps": 1},
            "eval": {"every": 2, "teachers": False},
            "checkpoint": {"keep": 2, "every": 1, "keep_best": "eval/*/accuracy", "mirror": "yes"},
        },
        Shape(Faults(prompts=frozenset({1}))),
        True,
        (process, replace(process, end="")),
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert life.live(folder) == []
    return folder


def lines(path: Path, change: Callable[[list[str]], list[str]]) -> None:
    path.write_text("".join(f"{line}\n" for line in change(path.read_text().splitlines())))


def parsed(path: Path, change: Callable[[Any], Any]) -> None:
    path.write_text(json.dumps(change(json.loads(path.read_text()))))


def without(word: str) -> Callable[[list[str]], list[str]]:
    """Removes the first line with the word."""

    def change(found: list[str]) -> list[str]:
        at = next(number for number, line in enumerate(found) if word in line)
        return found[:at] + found[at + 1 :]

    return change


def doubled(word: str) -> Callable[[list[str]], list[str]]:
    """Repeats the first line with the word, at the end."""
    return lambda found: [*found, next(line for line in found if word in line)]


def replaced(before: str, after: str) -> Callable[[list[str]], list[str]]:
    return lambda found: [line.replace(before, after) for line in found]


def another_way(found: Any) -> Any:
    found["steps"][1]["mark"] = 0.125
    return found


def summary_of(status: str) -> Callable[[Any], Any]:
    return lambda found: found | {"status": status}


def newest(folder: Path) -> Path:
    return max((folder / "run/checkpoints").glob("step_*"), key=lambda path: int(path.name[5:]))


BROKEN: dict[str, tuple[Callable[[Path], object], str]] = {
    "a row is missing": (
        lambda at: lines(at / "run/metrics.jsonl", without('"loss/total"')),
        "there are rows of steps [2, 3, 4, 5, 6]",
    ),
    "a row is there twice": (
        lambda at: lines(at / "run/metrics.jsonl", doubled('"loss/total"')),
        "there are rows of steps [1, 2, 3, 4, 5, 6, 1]",
    ),
    "a row is of another way": (
        lambda at: lines(at / "run/metrics.jsonl", replaced('"life/mark": 0.', '"life/mark": 0.5')),
        "the row of step 1 is of another way than the weights",
    ),
    "a sample is trained twice": (
        lambda at: lines(at / "run/ledger.jsonl", replaced("p9/1", "p0/0")),
        "p0/0 was trained or given up 2 times",
    ),
    "a sample is lost": (
        lambda at: lines(at / "run/ledger.jsonl", lambda found: [*found, '{"admitted":["p99/0"]}']),
        "1 samples were admitted and neither trained nor given up: ['p99/0']",
    ),
    "a step is not in the ledger": (
        lambda at: lines(at / "run/ledger.jsonl", without('"step":6')),
        "the run: the weights have 6 steps, the ledger 5; they differ from step 6 on",
    ),
    "too many samples are admitted": (
        lambda at: lines(at / "run/ledger.jsonl", lambda found: [found[-1], *found[:-1]][::-1]),
        "samples were admitted at version",
    ),
    "a dead letter is not written": (
        lambda at: lines(at / "run/dead_letters.jsonl", without("p1/0")),
        "the ledger and dead_letters.jsonl differ on ['p1/0']",
    ),
    "a dead letter has no reason": (
        lambda at: lines(at / "run/dead_letters.jsonl", replaced("no tokens", "")),
        "dead letters without a reason: ['p1/0', 'p1/1']",
    ),
    "an evaluation is missing": (
        lambda at: lines(at / "run/metrics.jsonl", without('"eval/seconds"')),
        "is due: no value, and no line in run.log",
    ),
    "an evaluation is there twice": (
        lambda at: lines(at / "run/metrics.jsonl", doubled('"eval/seconds"')),
        "have two evaluations",
    ),
    "an evaluation is of other weights": (
        lambda at: lines(
            at / "run/metrics.jsonl", replaced('"eval/a/accuracy": 0.', '"eval/a/accuracy": 0.5')
        ),
        "is not of these weights",
    ),
    "the evaluation before training is missing": (
        lambda at: lines(at / "run/metrics.jsonl", without('"eval_initial/seconds"')),
        "the evaluation before training is there 0 times",
    ),
    "answers of an evaluation are missing": (
        lambda at: (at / "run/evals/step_6.jsonl").unlink(),
        "evals has files of steps",
    ),
    "the best step is chosen by another value": (
        lambda at: parsed(
            at / "run/checkpoints/evaluated.json", lambda found: found | {"values": {"6": 2.0}}
        ),
        "evaluated.json has a value of step 6 that is not in the metrics",
    ),
    "the model is of another way": (
        lambda at: parsed(at / "run/model/history.json", another_way),
        "is of another way than the model",
    ),
    "a checkpoint is changed": (
        lambda at: parsed(newest(at) / "history.json", another_way),
        "history.json is not as the manifest says",
    ),
    "a checkpoint failed by a fault of the code": (
        lambda at: lines(
            at / "run/run.log",
            lambda log: [*log, "no checkpoint of step 4, the run goes on: TypeError: no state"],
        ),
        "no checkpoint of step 4, the run goes on: TypeError: no state",
    ),
    "a cut has lost a sample": (
        lambda at: parsed(
            newest(at) / "cut.json",
            lambda cut: cut | {"ledger": cut["ledger"] | {"in_flight": ["p77/0"]}},
        ),
        "its cut and the ledger differ on what is in flight: ['p77/0']",
    ),
    "a cut is of another step": (
        lambda at: parsed(newest(at) / "cut.json", lambda cut: cut | {"step": 3}),
        "its cut is of step 3, its weights of 6",
    ),
    "the summary has another status": (
        lambda at: parsed(at / "run/summary.json", summary_of("interrupted")),
        "the summary says interrupted",
    ),
    "a rollback is in one file only": (
        lambda at: (at / "run/roll_backs.json").write_text("[{}]"),
        "run.log has 0 rollbacks, roll_backs.json 1",
    ),
    "the mirror lacks the end": (
        lambda at: (at / "bucket/end/files.json").unlink(),
        "mirror: the run is completed, and its end is not there",
    ),
    "the mirror lacks the newest step": (
        lambda at: shutil.rmtree(at / "bucket/step_6"),
        "mirror: it has steps",
    ),
    "a file of a copy is changed": (
        lambda at: (at / "bucket/step_6/ledger.jsonl").write_text(""),
        "mirror: step_6/ledger.jsonl is not as its files.json says",
    ),
}


@pytest.mark.parametrize("name", BROKEN)
def test_the_oracle_finds_that(name: str, lived_run: Path, tmp_path: Path) -> None:
    change, wanted = BROKEN[name]
    broken = shutil.copytree(lived_run, tmp_path / "broken")
    change(broken)
    found = violations(broken / "run", broken / "bucket")
    assert any(wanted in one for one in found), found
