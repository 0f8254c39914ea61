"""The oracle: what is wrong with a run directory, by its files alone.

    run directory, bucket of its mirror ──own parsing──► violations, in words

It uses nothing of the product but the files: neither the audit nor what a resume reads. The weights
in checkpoints and models are those of ``stages``: a list of steps, each with a mark.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

HISTORY = "history.json"
NOT_MEASURED = re.compile(r"steps? (\d+)(?: to (\d+))?: .*evaluation")
THRESHOLD = re.compile(r"life: the staleness threshold is ([\d.]+)$")
EVALUATED = re.compile(r"step (\d+), versions? [^:]*: eval/")
RESUMED = re.compile(r"going on after step (\d+),|the run goes on after step (\d+)$")
NOT_WRITTEN = re.compile(
    r"no checkpoint of step \d+, the run goes on: \w+(?:Error|Exception|Group): .*"
)
"""Of an error that has a type there: neither of a file nor of a stage, which faults cause."""
CLOSE = 1e-5


def violations(run_dir: Path, bucket: Path | None = None, completed: bool = True) -> list[str]:
    """Every wrong fact; ``completed``: its last process has ended with exit code 0.

    Of a run that is not completed only the checkpoints and what belongs to them are judged.
    """
    try:
        run = _Run.read(run_dir)
        found = [*run.checkpoints_agree()]
        if bucket is not None and bucket.exists():
            found += run.copies_agree(bucket, completed)
        if completed:
            found += [*run.completes()]
    except (OSError, ValueError, LookupError, TypeError) as error:
        return [f"the run directory cannot be read: {type(error).__name__}: {error}"]
    return found


@dataclass
class _Account:
    """Counts of a part of a ledger: how often each uid was admitted, trained and given up."""

    admitted: Counter[str] = field(default_factory=Counter)
    trained: list[tuple[int, list[str]]] = field(default_factory=list)
    dead: Counter[str] = field(default_factory=Counter)

    def add(self, line: dict[str, Any]) -> None:
        self.admitted.update(line.get("admitted", ()))
        self.dead.update(line.get("dead", ()))
        if "step" in line:
            self.trained.append((line["step"], sorted(line["trained"])))

    @property
    def ends(self) -> Counter[str]:
        """How often each uid was trained or given up."""
        return Counter(uid for _, uids in self.trained for uid in uids) + self.dead

    @property
    def in_flight(self) -> set[str]:
        return set(self.admitted) - set(self.ends)

    def agrees(self, steps: list[dict[str, Any]], of: str) -> Iterator[str]:
        """Violations of the account beside the weights that these steps have made."""
        made = [(step["step"], step["uids"]) for step in steps]
        if made != self.trained:
            at = next(
                (
                    i
                    for i, pair in enumerate(zip(made, self.trained, strict=False))
                    if len({*map(repr, pair)}) > 1
                ),
                min(len(made), len(self.trained)),
            )
            yield (
                f"{of}: the weights have {len(made)} steps, the ledger {len(self.trained)}; "
                f"they differ from step {at + 1} on"
            )
        for uid, count in self.admitted.items():
            if count > 1:
                yield f"{of}: {uid} was admitted {count} times"
        for uid, count in self.ends.items():
            if count > 1:
                yield f"{of}: {uid} was trained or given up {count} times"
            if not self.admitted[uid]:
                yield f"{of}: {uid} was trained or given up, and never admitted"


@dataclass
class _Run:
    folder: Path
    config: dict[str, Any]
    log: list[str]
    rows: list[dict[str, Any]]
    checkpoints: dict[int, Path]

    @classmethod
    def read(cls, folder: Path) -> _Run:
        config = yaml.load((folder / "config.yaml").read_text(), Loader=yaml.CSafeLoader)
        log = (folder / "run.log").read_text().splitlines()
        rows = _lines(folder / "metrics.jsonl")
        found = {
            int(path.name[5:]): path
            for path in (folder / "checkpoints").glob("step_*")
            if path.name[5:].isdecimal()
        }
        return cls(folder, config, log, rows, dict(sorted(found.items())))

    @property
    def batch(self) -> int:
        return int(self.config["train"]["batch_size"])

    @property
    def steps(self) -> int:
        return int(self.config["train"]["steps"])

    # ── at any time ────────────────────────────────────────────────────────────────────────────

    def checkpoints_agree(self) -> Iterator[str]:
        """Each checkpoint is whole, its cut is that of the ledger, and all are of one way."""
        yield from (found[0] for found in map(NOT_WRITTEN.search, self.log) if found)
        histories = {}
        for step, path in self.checkpoints.items():
            yield from self._checkpoint(path, self.folder / "ledger.jsonl")
            histories[step] = _history(path)
        for (_, earlier), (step, later) in zip(
            list(histories.items())[:-1], list(histories.items())[1:], strict=True
        ):
            if later[: len(earlier)] != earlier:
                yield f"the checkpoint of step {step} is of another way than the one before it"
        if histories:
            step, history = max(histories.items())
            yield from self._rows_agree(history, step)

    def _checkpoint(self, path: Path, ledger: Path) -> Iterator[str]:
        of = f"{path.name}"
        manifest = json.loads((path / "manifest.json").read_text())
        for name, file in manifest.items():
            content = (path / name).read_bytes()
            if [len(content), hashlib.sha256(content).hexdigest()] != [
                file["bytes"],
                file["sha256"],
            ]:
                yield f"{of}: {name} is not as the manifest says"
        cut, history = json.loads((path / "cut.json").read_text()), _history(path)
        step = int(path.name[5:])
        if not step == cut["step"] == len(history):
            yield f"{of}: its cut is of step {cut['step']}, its weights of {len(history)}"
        part = ledger.read_bytes()[: (size := cut["files"]["ledger.jsonl"])]
        if len(part) < size or (part and not part.endswith(b"\n")):
            yield f"{of}: its cut of the ledger, {size} bytes, is not at the end of a line"
            return
        account = _Account()
        for line in part.splitlines():
            account.add(json.loads(line))
        yield from account.agrees(history, of)
        state = cut["ledger"]
        if set(state["in_flight"]) != account.in_flight:
            odd = sorted(set(state["in_flight"]) ^ account.in_flight)
            yield f"{of}: its cut and the ledger differ on what is in flight: {odd[:5]}"
        if sorted(state["dead_lettered"]) != sorted(account.dead):
            yield f"{of}: its cut and the ledger differ on what was given up"
        if state["trained"] != sum(len(uids) for _, uids in account.trained):
            yield f"{of}: its cut has {state['trained']} trained samples"

    def _rows_agree(self, history: list[dict[str, Any]], until: int) -> Iterator[str]:
        """Each step up to ``until`` has one row, of the way that these weights have come."""
        rows = [row for row in self.rows if "loss/total" in row and row["step"] <= until]
        if [row["step"] for row in rows] != list(range(1, until + 1)):
            yield f"up to step {until} there are rows of steps {[row['step'] for row in rows]}"
        for row in rows:
            if "life/mark" in row and row["life/mark"] != _mark(history, row["step"]):
                yield f"the row of step {row['step']} is of another way than the weights"

    # ── the mirror ─────────────────────────────────────────────────────────────────────────────

    def copies_agree(self, bucket: Path, completed: bool) -> Iterator[str]:
        """Copies that are complete are whole; the newest one is of the run's own way."""
        complete = {}
        for copy in sorted(bucket.glob("*/files.json")):
            for name, file in json.loads(copy.read_text()).items():
                content = (copy.parent / name).read_bytes()
                if file["sha256"] != hashlib.sha256(content).hexdigest():
                    yield f"mirror: {copy.parent.name}/{name} is not as its files.json says"
            complete[copy.parent.name] = copy.parent
            if copy.parent.name.startswith("step_"):
                part = copy.parent / "checkpoints" / copy.parent.name
                for one in self._checkpoint(part, copy.parent / "ledger.jsonl"):
                    yield f"mirror: {one}"
        if completed:
            yield from self._mirrored(complete)

    def _mirrored(self, complete: dict[str, Path]) -> Iterator[str]:
        """Violations in the copies of a completed run, by name."""
        steps = sorted(int(name[5:]) for name in complete if name.startswith("step_"))
        final = _history(self.folder / "model")
        if "end" not in complete:
            yield "mirror: the run is completed, and its end is not there"
        if steps[-1:] != list(self.checkpoints)[-1:]:
            yield f"mirror: it has steps {steps}, the run {list(self.checkpoints)}"
        for step in steps:
            copy = complete[f"step_{step}"]
            if _history(copy / "checkpoints" / f"step_{step}") != final[:step]:
                yield f"mirror: step {step} is of another way than the model"
        for name, copy in complete.items():
            there, here = (_json(one / "roll_backs.json", []) for one in (copy, self.folder))
            if there != here:
                yield f"mirror: {name} has {len(there)} rollbacks, the run {len(here)}"

    # ── a completed run ────────────────────────────────────────────────────────────────────────

    def completes(self) -> Iterator[str]:
        """Violations of a completed run."""
        summary = json.loads((self.folder / "summary.json").read_text())
        if summary["status"] != "completed":
            yield f"the summary says {summary['status']}: {summary['error']}"
        history = _history(self.folder / "model")
        if len(history) != self.steps:
            yield f"the model has {len(history)} of {self.steps} steps"
        for step, path in self.checkpoints.items():
            if _history(path) != history[:step]:
                yield f"the checkpoint of step {step} is of another way than the model"
        yield from self._rows_agree(history, self.steps)
        yield from self._ledger(history)
        yield from self._evaluations(history)
        yield from self._roll_backs(history)

    def _ledger(self, history: list[dict[str, Any]]) -> Iterator[str]:
        account, k = _Account(), self.config["async"]["sync_steps"]
        most = max(float(found[1]) for found in map(THRESHOLD.search, self.log) if found)
        beyond: list[str] = []
        for line in _lines(self.folder / "ledger.jsonl"):
            account.add(line)
            version = (account.trained[-1][0] if account.trained else 0) // k
            bound = min((version + 1 + most) * k, self.steps) * self.batch
            if (taken := account.admitted.total() - account.dead.total()) > bound:
                beyond.append(f"{taken} samples were admitted at version {version}, {bound:g} may")
        yield from beyond[:1]
        yield from account.agrees(history, "the run")
        if lost := sorted(account.in_flight):
            yield f"{len(lost)} samples were admitted and neither trained nor given up: {lost[:5]}"
        for step, uids in account.trained:
            if len(uids) != self.batch:
                yield f"step {step} has trained {len(uids)} samples"
        letters = _lines(self.folder / "dead_letters.jsonl")
        named = Counter(one["uid"] for one in letters if not one["uid"].startswith("eval "))
        if named != account.dead:
            odd = sorted((named - account.dead) + (account.dead - named))
            yield f"the ledger and dead_letters.jsonl differ on {odd[:5]}"
        if bare := [one["uid"] for one in letters if not one["reason"]]:
            yield f"dead letters without a reason: {bare[:5]}"
        late = [row["step"] for row in self.rows if row.get("staleness/max", 0)]
        if most == 0 and late:
            yield f"with threshold 0 steps {late} have trained stale samples"

    def _measured_before(self) -> set[int]:
        """Steps whose evaluation came before a resume or a rollback to them."""
        measured, before = set[int](), set[int]()
        for line in self.log:
            if found := EVALUATED.search(line):
                measured.add(int(found[1]))
            elif found := RESUMED.search(line):
                before |= measured & {int(next(filter(None, found.groups())))}
        return before

    def _evaluations(self, history: list[dict[str, Any]]) -> Iterator[str]:
        own, k = self.config["eval"], self.config["async"]["sync_steps"]
        every = own["every_steps"] or own["every"] * k
        rows = [row for row in self.rows if "eval/seconds" in row]
        count = Counter(row["step"] for row in rows)
        if twice := [step for step, times in count.items() if times > 1]:
            yield f"steps {twice} have two evaluations"
        initial = sum("eval_initial/seconds" in row for row in self.rows)
        if self.config["eval"]["before"] and initial != 1:
            yield f"the evaluation before training is there {initial} times"
        resumed = {
            int(next(filter(None, found.groups())))
            for found in map(RESUMED.search, self.log)
            if found is not None
        }
        before = self._measured_before()
        said = {
            step
            for found in map(NOT_MEASURED.search, self.log)
            if found is not None
            for step in range(int(found[1]), int(found[2] or found[1]) + 1)
        }
        due = [*(range(every, self.steps, every) if every else ()), self.steps]
        for at, following in zip(due, [*due[1:], self.steps + 1], strict=True):
            instead = any(step in count for step in resumed if at <= step < following)
            if at not in count and not instead and at not in said:
                yield f"the evaluation of step {at} is due: no value, and no line in run.log"
        for row in rows:
            exact = row["eval/oldest_version"] == row["eval/newest_version"]
            version, step = int(row["eval/oldest_version"]), row["step"]
            # within a version the engines have those of its first step, or of a resume since
            own_weights = not step % k or step == self.steps or step in resumed - before
            since = [version * k, *(one for one in resumed if one // k == version)]
            made = [step] if own_weights else since
            marks = [_mark(history, one) for one in made if one]
            if exact and version and all(abs(row["eval/a/accuracy"] - m) > CLOSE for m in marks):
                yield f"the evaluation of step {row['step']} is not of these weights"
        files = {int(path.stem[5:]) for path in (self.folder / "evals").glob("step_*.jsonl")}
        moved = any("is taken from" in line for line in self.log)  # a step's copy has no answers
        if (files - {0}) ^ set(count) and not (moved and files - {0} < set(count)):
            yield f"evals has files of steps {sorted(files)}, the metrics {sorted(count)}"
        values = _json(self.folder / "checkpoints" / "evaluated.json", {}).get("values", {})
        for step, value in values.items():
            own = [
                (row["eval/a/accuracy"] + row["eval/b/accuracy"]) / 2
                for row in rows
                if row["step"] == int(step)
            ]
            if not own or abs(own[0] - value) > CLOSE:
                yield f"evaluated.json has a value of step {step} that is not in the metrics"

    def _roll_backs(self, history: list[dict[str, Any]]) -> Iterator[str]:
        count = len(_json(self.folder / "roll_backs.json", []))
        factors = [step["lr"] for step in history]
        allowed = {0.5**number for number in range(count + 1)}
        if factors != sorted(factors, reverse=True) or not set(factors) <= allowed:
            yield f"with {count} rollbacks the learning rates' factors are {factors}"
        done = sum("rollback " in line and " of at most " in line for line in self.log)
        if done != count:
            yield f"run.log has {done} rollbacks, roll_backs.json {count}"
        if any(row.get("train/truncated_share") for row in self.rows):
            yield "a step is left that exceeds the guardrail's limit"


def _lines(path: Path) -> list[dict[str, Any]]:
    """The objects of a file that may end with a torn line."""
    if not path.exists():
        return []
    return [json.loads(line) for line in path.read_text().split("\n")[:-1]]


def _json(path: Path, otherwise: Any) -> Any:
    return json.loads(path.read_text()) if path.exists() else otherwise


def _history(folder: Path) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads((folder / HISTORY).read_text())["steps"]
    return found


def _mark(history: list[dict[str, Any]], step: int) -> float:
    return float(history[step - 1]["mark"]) if 0 < step <= len(history) else math.nan
