"""Every module of benchmarks/ with a main runs at its smallest size, and prints its figures last.

Each runs once in a separate process, as the docs name it: all tests read what it printed.
"""

from __future__ import annotations

import json
import math
import os
import re
import shlex
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
MAIN = 'if __name__ == "__main__":'
BOUND_S = 900.0
MARKS = {
    "little": (pytest.mark.slow,),
    "torch": (pytest.mark.long,),
    "ray": (pytest.mark.engine, pytest.mark.long),
    "runs": (pytest.mark.engine, pytest.mark.long, pytest.mark.whole),
}
"""By what a module starts. ``little``: it ends within seconds. ``ray``: with or without engines."""


@dataclass(frozen=True)
class Case:
    """The arguments of the smallest run of a module, and what it ``starts``.

    In them ``{name}`` is the folder of another module's run, which comes before, and ``{}`` its own
    folder.
    """

    arguments: str = ""
    starts: str = "torch"


ONE_TEACHER = (
    "'teachers={sort: {model: ../quickstart/models/teacher-sort, sources: [sort, reverse]}}'"
)
QUICK = "train.steps=2 train.batch_size=8 train.warmup_steps=0 eval.max_prompts=4 eval.before=false"
CASES = {
    "balancer": Case("--repeats 1 --replicas 2 --requests 40 --decisions 10000", "ray"),
    "chaos": Case("--minutes 0.3 --every 10 --out {}", "runs"),
    "checkpoint": Case("--layers 1 --rounds 1"),
    "episodes": Case("--episodes 64", "little"),
    "expert_sync": Case("--layers 1 --experts 2 --repeats 1", "runs"),
    "freshness": Case(
        "{objectives}/forward_kl_topk --syncs 1 --dtypes bfloat16 fp8_per_channel", "ray"
    ),
    "half_version": Case(),
    "hand_out": Case("--tokens 64 --batch 4 --steps 1 --ranks 2", "ray"),
    "house": Case(starts="little"),
    "lives": Case("--minutes 0.02", "little"),
    "load_memory": Case("--layers 1 --ranks 1 2"),
    "losses": Case("--tokens 256 --vocabulary 16384 --hidden 32 --repeats 1"),
    "media": Case("--steps 2", "ray"),
    "memory": Case(
        "--only '4B full, 8' 'Qwen3 full' --layers 4 --loaded-layers 1 --loading-ranks 1"
    ),
    "microscope": Case("--batch 4 --median 16 --blocks 1"),
    "mutants": Case("--only accounting --share 0.1", "little"),
    "mismatch": Case("--steps 4 --only float32", "runs"),
    "objectives": Case(
        f"{QUICK} {ONE_TEACHER} async.sync_steps=1 --out {{}} --only forward_kl_topk", "ray"
    ),
    "observability": Case("--blocks 1 --students 1 --batch 64", "ray"),
    "pipeline": Case("--only s1_4 --samples 1536", "ray"),
    "plan": Case("--measured {pipeline}/printed", "ray"),
    "probe": Case("--pairs 5 8 10 --steps 12 --cache {}"),
    "payloads": Case("--mib 0.25 --samples 64", "ray"),
    "queue": Case("--repeats 1 --only topk_2048 --batches 4", "ray"),
    "ranks": Case("--layers 1 --batch 2 --tokens 8 --steps 2 --repeats 1"),
    "scale": Case("--replicas 4 8 --requests 64 --rate 64 --samples 768", "ray"),
    "scoring": Case("--repeats 1 --rollouts 2 --long-rollouts 4", "runs"),
    "soak": Case("--rollouts 2494 --long 6", "ray"),
    "staleness": Case(
        f"{QUICK} --out {{}} --loss forward_kl --staleness 0.5 --sync-steps 1", "runs"
    ),
    "start": Case("--repeats 1", "runs"),
    "trainer": Case("--batch 4 --median 16 --pairs 1"),
    "walks": Case("--out {}", "runs"),
    "weight_sync": Case("--repeats 1 --layers 1", "runs"),
}

NO_CASE = Case(starts="little")
"""Its test fails before it starts anything."""


def modules() -> list[str]:
    """The runnable modules of the folder, as they are named behind ``benchmarks.``."""
    folder = ROOT / "benchmarks"
    files = sorted(path for path in folder.rglob("*.py") if MAIN in path.read_text())
    return [".".join(path.relative_to(folder).with_suffix("").parts) for path in files]


def marked(name: str) -> Any:
    """The module as a parameter, marked by what it starts."""
    return pytest.param(name, marks=MARKS[CASES.get(name, NO_CASE).starts])


class Runs:
    """The modules' runs, each made when its figures are asked for the first time."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._ran: dict[str, Path] = {}

    def figures(self, name: str) -> dict[str, Any]:
        """The JSON object in the last line that a module printed."""
        file = self.run(name) / "printed"
        found: dict[str, Any] = json.loads(file.read_text().splitlines()[-1])
        return found

    def run(self, name: str) -> Path:
        """The folder of a module's run, with what it ``printed``."""
        if name not in self._ran:
            self._ran[name] = self._made(name)
        return self._ran[name]

    def _made(self, name: str) -> Path:
        folder = self._folder / name
        folder.mkdir(exist_ok=True)
        given = [self._filled(word, name) for word in shlex.split(CASES[name].arguments)]
        command = [sys.executable, "-m", f"benchmarks.{name}", *given]
        with (folder / "printed").open("w") as printed, (folder / "errors").open("w") as errors:
            process = subprocess.Popen(
                command, cwd=ROOT, stdout=printed, stderr=errors, start_new_session=True
            )
            try:
                code = process.wait(BOUND_S)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
                raise
        texts = [(folder / file).read_text()[-4000:] for file in ("printed", "errors")]
        assert code == 0, "\n".join([" ".join(command), *texts])
        return folder

    def _filled(self, word: str, own: str) -> str:
        def folder(name: re.Match[str]) -> str:
            return str(self.run(name[1]) if name[1] else self._folder / own)

        return re.sub(r"\{([\w.]*)\}", folder, word)


def unmeasured(figures: Any, name: str = "") -> Iterator[str]:
    """The names of figures that are missing or not finite."""
    if isinstance(figures, dict | list) and figures:
        pairs = figures.items() if isinstance(figures, dict) else enumerate(figures)
        for key, value in pairs:
            yield from unmeasured(value, f"{name}.{key}")
    elif figures in (None, {}, []) or (isinstance(figures, float) and not math.isfinite(figures)):
        yield name


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Runs:
    return Runs(tmp_path_factory.mktemp("benchmarks"))


@pytest.mark.parametrize("name", [marked(name) for name in modules()])
def test_a_benchmark_runs_and_prints_its_figures_last(name: str, runs: Runs) -> None:
    assert name in CASES, f"benchmarks.{name} has no case: add its smallest size to CASES"
    figures = runs.figures(name)
    assert figures
    assert list(unmeasured(figures)) == []


def test_no_case_is_of_a_module_that_is_gone() -> None:
    assert CASES.keys() <= set(modules())


# ── what holds at any size ─────────────────────────────────────────────────────────────────────


@pytest.mark.slow
def test_nothing_is_wrong_with_random_lives(runs: Runs) -> None:
    found = runs.figures("lives")
    assert found["runs"] > 0
    assert found["violations"] == 0


@pytest.mark.long
def test_a_checkpoint_takes_one_copy_of_its_share_in_each_rank(runs: Runs) -> None:
    found = runs.figures("checkpoint")
    assert 0.9 < found["peak_ratio"] < 1.3
    assert found["share_mb"] > 100


@pytest.mark.long
def test_every_term_of_a_steps_memory_is_within_a_tenth(runs: Runs) -> None:
    found = runs.figures("memory")
    assert found["cases"] == 2
    assert abs(found["worst_ratio"] - 1) < 0.1


@pytest.mark.parametrize("name", [marked(n) for n in ("losses", "ranks", "scoring", "trainer")])
def test_two_ways_to_compute_the_same_agree(name: str, runs: Runs) -> None:
    found = runs.figures(name)
    cases = found.values() if name == "losses" else [found]
    assert all(case["difference"] < 1e-4 for case in cases)


@pytest.mark.engine
@pytest.mark.long
def test_a_killed_replica_loses_no_request(runs: Runs) -> None:
    found = runs.figures("balancer")
    assert found["killed_ok"] == found["killed_total"] == 40


@pytest.mark.engine
@pytest.mark.long
def test_an_image_crosses_process_borders_at_most_1_2_times_for_a_sample(runs: Runs) -> None:
    found = runs.figures("media")
    assert (found["samples"], found["n"], found["ranks"]) == (128, 8, 2)
    assert found["held_at_the_end"] == 0
    assert 0.25 < found["images_only"] <= found["copies"] <= 1.2


@pytest.mark.engine
@pytest.mark.long
def test_every_fault_of_a_sync_is_found_and_nothing_else(runs: Runs) -> None:
    found = runs.figures("freshness")
    assert found["caught"] == found["faults"] == {"bfloat16": 12, "fp8_per_channel": 16}
    assert found["false_alarms"] == 0


@pytest.mark.engine
@pytest.mark.long
def test_every_rollout_of_a_soak_is_trained_once(runs: Runs) -> None:
    found = runs.figures("soak")
    assert (found["lost"], found["duplicated"], found["rollouts"]) == (0, 0, 2500)
    assert set(found["loop_lag_s"]) == {"driver", "queue", "scorer"}
    assert found["peak_memory_gib"] < 8


@pytest.mark.slow
def test_episodes_keep_engines_busy_and_their_loop_takes_little(runs: Runs) -> None:
    found = runs.figures("episodes")
    assert found["busy_ratio"] >= 0.9
    assert max(found["render_share"], found["render_share_template"]) <= 0.01
