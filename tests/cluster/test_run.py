"""``async_opd run`` as a user runs it: real vLLM, a real Ray cluster, real wandb (offline)."""

from __future__ import annotations

import itertools
import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

import psutil
import pytest

from async_opd.checkpoint.store import Checkpoints
from async_opd.config.device_defaults import resolved
from async_opd.config.load import load_config
from async_opd.models.tokenizer import Text
from async_opd.observability.metric_catalogue import unknown
from async_opd.tools.dry_run import outputs

pytestmark = [pytest.mark.engine, pytest.mark.slow]  # slow: first, beside all other engines

EXAMPLE = Path(__file__).parents[2] / "examples" / "quickstart.yaml"
SHORT = ["train.steps=6", "async.sync_steps=2", "eval.every=2", "eval.max_prompts=32"]
ONE_TEACHER = "teachers={sort: {model: quickstart/models/teacher-sort, sources: [sort, reverse]}}"
"""For what does not depend on their number: an engine less to start."""
BEST = "checkpoint.keep_best=eval/*/accuracy"
EXACT = "train.export_dtype=float32"
"""The engines' precision on a CPU: rounded to the student's bfloat16, 2 of 100 answers differ."""
DONE = ["rollout.replicas=2", "async.max_version_lag=0", BEST, "checkpoint.every_steps=3", EXACT]
BOUND_S = 900
"""Above all that a run takes beside two others: two at a time have taken 300 s for one of 35."""


@dataclass
class Run:
    """A finished run and what it left."""

    code: int
    output: str
    directory: Path
    left: list[str]

    @property
    def summary(self) -> dict[str, Any]:
        return dict(json.loads((self.directory / "summary.json").read_text()))

    @property
    def metrics(self) -> list[dict[str, Any]]:
        """All rows; of a run that goes on without one that is being written."""
        text = (self.directory / "metrics.jsonl").read_text()
        return [json.loads(line) for line in text[: text.rfind("\n") + 1].splitlines()]

    def values(self, key: str) -> list[Any]:
        """Of a metric, in all rows that have it."""
        return [line[key] for line in self.metrics if key in line]

    def overlaps(self, *names: str) -> list[Any]:
        """Pairs of spans of different names in the trace that are at the same time."""
        events = json.loads((self.directory / "trace.json").read_text())["traceEvents"]
        work = sorted(
            (event["ts"], event["ts"] + event["dur"], event["name"])
            for event in events
            if event.get("ph") == "X" and event["name"] in names
        )
        assert {name for _, _, name in work} == set(names)
        return [(a, b) for a, b in itertools.pairwise(work) if a[2] != b[2] and b[0] < a[1]]

    def ended(self, code: int, status: str) -> bool:
        """Whether it ended so, and left no process behind."""
        return (self.code, self.summary["status"], self.left) == (code, status, [])


class Running:
    """``async_opd run`` in a process of its own."""

    def __init__(
        self,
        directory: Path,
        *overrides: str,
        example: Path = EXAMPLE,
        program: tuple[str, ...] = ("async_opd",),
        inside: tuple[str, ...] = (),
    ) -> None:
        self.directory = directory
        command = [sys.executable, "-m", *program, "run", str(example), *SHORT, *overrides]
        self.output = (directory.parent / f"{directory.name}.txt").open("w+")
        self.process = subprocess.Popen(
            [*inside, *command, "--run-dir", str(directory)],
            stdout=self.output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        self.family: dict[int, psutil.Process] = {}

    def until(self, text: str, times: int = 1) -> None:
        """Waits until the output holds a text so many times."""
        deadline = time.monotonic() + BOUND_S
        while self.read().count(text) < times:
            assert self.process.poll() is None, self.read()
            assert time.monotonic() < deadline, self.read()
            self.look()
            time.sleep(0.2)

    def until_there(self, path: Path) -> None:
        """Waits for a file."""
        deadline = time.monotonic() + BOUND_S
        while not path.exists():
            assert self.process.poll() is None, self.read()
            assert time.monotonic() < deadline, self.read()
            time.sleep(0.01)

    def look(self) -> None:
        """Remembers all processes below the run."""
        for child in psutil.Process(self.process.pid).children(recursive=True):
            self.family[child.pid] = child

    def processes(self, box: str) -> dict[str, psutil.Process]:
        """The live processes of one replica: its ``actor`` and its ``engine``."""
        self.look()
        found = {}
        for process in self.family.values():
            try:
                if process.environ().get("ASYNC_OPD_ACTOR") == box:
                    if "EngineCore" in process.name():
                        found["engine"] = process
                    elif "ray::" in process.name():
                        found["actor"] = process
            except psutil.Error:
                continue  # gone meanwhile
        return found

    def read(self) -> str:
        self.output.flush()
        return Path(self.output.name).read_text()

    def end(self, bound_s: float = BOUND_S) -> Run:
        """Waits for the exit; gives leftovers a few seconds to be gone."""
        code = self.process.wait(bound_s)
        _, left = psutil.wait_procs(list(self.family.values()), timeout=30)
        names = [" ".join(p.cmdline())[:80] for p in left if p.is_running()]
        return Run(code, self.read(), self.directory, names)


@pytest.fixture(scope="module")
def done(tmp_path_factory: pytest.TempPathFactory) -> Run:
    running = Running(tmp_path_factory.mktemp("runs") / "done", *DONE)
    running.until("everything is up")
    running.look()
    return running.end()


def test_the_run_writes_what_a_dry_run_names(done: Run) -> None:
    config = load_config(done.directory / "config.yaml")
    assert {path.name for path in done.directory.iterdir()} <= set(outputs(config))


def test_every_metric_of_the_run_is_in_the_catalogue(done: Run) -> None:
    logged = {key for line in done.metrics for key in line}
    assert unknown(logged | {key for key in done.summary if "/" in key}) == []


def test_a_run_exits_0_and_leaves_no_process_behind(done: Run) -> None:
    assert done.ended(0, "completed"), done.output


def test_the_best_student_is_written_beside_the_last_one(done: Run) -> None:
    best = done.directory / "best" / "model.safetensors"
    last = done.directory / "model" / "model.safetensors"
    assert (best.read_bytes() == last.read_bytes()) == (done.summary["checkpoint/best_step"] == 6)


def test_a_step_within_a_version_has_a_checkpoint_if_so_many_steps_are_between_two(
    done: Run,
) -> None:
    assert f"checkpoint of step 3: {done.directory}" in (done.directory / "run.log").read_text()


def test_the_best_value_is_the_highest_of_all_evaluations(done: Run) -> None:
    keys = ("eval/sort/accuracy", "eval/reverse/accuracy")
    values = [fmean(line[key] for key in keys) for line in done.metrics if keys[0] in line]
    assert done.summary["checkpoint/best"] == pytest.approx(max(values))


def test_every_step_is_in_the_metrics_with_the_names_of_the_design(done: Run) -> None:
    rows = [line for line in done.metrics if "loss/total" in line]
    assert [line["step"] for line in rows] == [1, 2, 3, 4, 5, 6]
    for prefix in ("rollout/", "teacher/sort/", "teacher/reverse/", "queue/scored/", "train/"):
        assert any(key.startswith(prefix) for key in rows[-1])


def test_every_evaluation_leaves_its_answers_with_the_versions_that_it_names(done: Run) -> None:
    logged = [line for line in done.metrics if "eval/sort/accuracy" in line]
    assert logged[-1]["step"] == 6
    for line in logged:
        file = done.directory / "evals" / f"step_{line['step']}.jsonl"
        answers = [json.loads(text) for text in file.read_text().splitlines()]
        versions = [span[0] for answer in answers for span in answer["versions"]]
        assert (len(answers), min(versions), max(versions)) == (
            64,
            line["eval/oldest_version"],
            line["eval/newest_version"],
        )
        right = [answer["score"] for answer in answers if answer["data_source"] == "sort"]
        assert fmean(right) == pytest.approx(line["eval/sort/mean@1"])


def test_every_data_source_has_accuracies_and_the_teachers_know_their_task(done: Run) -> None:
    for source in ("sort", "reverse"):
        assert {f"eval_initial/{source}/accuracy", f"eval/{source}/accuracy"} <= {*done.summary}
        assert done.summary[f"eval_teacher/{source}/accuracy"] >= 0.97


def test_all_samples_were_trained_and_those_beyond_the_hard_bound_ran_again(done: Run) -> None:
    assert done.summary["ledger/trained"] == 6 * 128
    assert set(done.values("staleness/max")) == {0}
    assert done.summary["ledger/requeued"] == sum(done.values("staleness/requeued")) > 0


def test_its_config_loads_again_to_an_equal_object(done: Run) -> None:
    config = load_config(done.directory / "config.yaml")
    overrides = [*SHORT, *DONE, f"run_dir={done.directory}", "train.compile=false"]
    assert config == resolved(load_config(EXAMPLE, overrides), "cpu")


def test_it_leaves_a_trace_and_an_offline_run_of_wandb(done: Run) -> None:
    assert list((done.directory / "wandb").glob("offline-run-*"))
    assert json.loads((done.directory / "trace.json").read_text())["traceEvents"]


def test_the_model_gives_the_evaluated_answers_in_transformers(done: Run) -> None:
    import torch
    from transformers import AutoModelForCausalLM

    torch.set_num_threads(1)
    model = AutoModelForCausalLM.from_pretrained(done.directory / "model", dtype=torch.float32)
    text = Text(done.directory / "model")
    rows = [json.loads(line) for line in (done.directory / "evals/step_6.jsonl").open()]
    rows = [row for row in rows if row["data_source"] == "sort"]
    prompts = torch.tensor([text.encode(row["prompt"]) for row in rows])
    found = model.generate(
        prompts,
        attention_mask=torch.ones_like(prompts),
        max_new_tokens=8,
        do_sample=False,
        output_logits=True,
        return_dict_in_generate=True,
    )
    answers = [text.decode(tokens.tolist()) for tokens in found.sequences[:, prompts.shape[1] :]]
    best, second = torch.stack(found.logits).topk(2).values.unbind(-1)
    # where two tokens are within rounding of each other, vLLM may take the other one
    clear = (best - second > 1e-4).all(dim=0).tolist()
    assert sum(clear) >= 30
    for answer, row, certain in zip(answers, rows, clear, strict=True):
        assert answer == row["response"] or not certain


@pytest.fixture(scope="module")
def interrupted(tmp_path_factory: pytest.TempPathFactory) -> Run:
    running = Running(
        tmp_path_factory.mktemp("runs") / "interrupted", "train.steps=500", ONE_TEACHER
    )
    running.until("step 0, version 0: eval_teacher")
    running.look()
    os.killpg(running.process.pid, signal.SIGINT)  # as Ctrl-C in a terminal does
    return running.end()


def test_an_interrupted_run_exits_130_with_its_model_and_leaves_no_process_behind(
    interrupted: Run,
) -> None:
    assert interrupted.ended(130, "interrupted"), interrupted.output
    assert (interrupted.directory / "model" / "model.safetensors").is_file()


def test_an_interrupted_run_leaves_a_checkpoint_and_a_row_of_each_of_its_steps(
    interrupted: Run,
) -> None:
    store = Checkpoints(interrupted.directory / "checkpoints", 2)
    newest = store.newest(pytest.fail)
    assert newest.cut.ledger.trained == 128 * newest.cut.step
    rows = [row["step"] for row in interrupted.metrics if "loss/total" in row]
    assert rows == list(range(1, newest.cut.step + 1))


@pytest.fixture(scope="module")
def engine_missing(tmp_path_factory: pytest.TempPathFactory) -> Run:
    running = Running(
        tmp_path_factory.mktemp("runs") / "missing",
        ONE_TEACHER,
        "teachers.sort.engine.extra={quantization: no_such_method}",
    )
    running.until("starting Ray")
    return running.end()


def test_an_engine_that_does_not_start_ends_the_run_with_1_and_is_named_with_its_reason(
    engine_missing: Run,
) -> None:
    assert engine_missing.code == 1, engine_missing.output
    assert "teacher sort/0" in engine_missing.summary["error"]
    assert "no_such_method" in engine_missing.summary["error"]


@pytest.fixture(scope="module")
def on_policy(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """At least three steps; then both engines are killed, which are not to be restarted."""
    running = Running(
        tmp_path_factory.mktemp("runs") / "on_policy",
        ONE_TEACHER.replace("quickstart/", "../quickstart/"),
        "rollout.replicas=2",
        "sync.rolling=true",
        "async={staleness_threshold: 0, sync_steps: 1, on_sync: finish}",
        "train.steps=500",
        "supervision.max_restarts=0",
        "eval.every=0",
        "checkpoint.every=1",
        "log.wandb=off",
        example=EXAMPLE.parent / "objectives" / "k1_policy_gradient.yaml",
    )
    running.until("checkpoint of step 3")
    engines = [running.processes(f"student/{replica}")["engine"] for replica in (0, 1)]
    for engine in engines:
        engine.kill()
    return running.end()


@pytest.mark.long
def test_an_on_policy_run_has_no_staleness_and_rollouts_have_the_trainers_own_logprobs(
    on_policy: Run,
) -> None:
    assert len(on_policy.values("staleness/max")) >= 3, on_policy.output
    assert set(on_policy.values("staleness/max")) == {0}
    assert max(on_policy.values("loss/rollout_gap")) < 1e-4


@pytest.mark.long
def test_a_rolling_sync_reports_the_stall_of_every_replica(on_policy: Run) -> None:
    for replica in (0, 1):
        assert on_policy.summary[f"sync/student/{replica}/stall_s"] > 0


@pytest.mark.long
def test_a_run_whose_engines_die_once_too_often_names_the_stage_and_leaves_no_process_behind(
    on_policy: Run,
) -> None:
    assert on_policy.ended(1, "failed"), on_policy.output
    assert "student/" in on_policy.summary["error"]
