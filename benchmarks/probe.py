"""Whether ``async_opd probe`` predicts what distillation gains, on pairs of tiny models.

    python -m benchmarks.probe [--seed N] [--pairs A-B …] [--steps N] [--cache DIR]

Trains students and teachers of digit tasks from fixed seeds, probes each pair with the code of
``async_opd.tools.probe``, and distils it in one process with the real pipeline and learner, on one
core.

    spearman         rank correlation of the probe's score with the gain in accuracy, over all pairs
    spearman_gain    the same over the pairs that gained at least 0.02
    templates_found  wrong templates that were found / those and all other pairs that were called so
    cost_share       seconds of a probe / seconds of a run of 1,000 steps, without engine starts
    seconds          CPU time of all pairs, with the training of their models

Pairs that ``--cache`` holds are not made again: ``--pairs 1-10 12`` makes a part. Prints a table as
Markdown, then one JSON line, without the figures for which there are too few pairs.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from tempfile import gettempdir
from typing import Any

import numpy as np
import torch

from async_opd.core.row import Row
from async_opd.core.samples import Prompt, Rollout
from async_opd.core.uid import Uid
from async_opd.grading.graders import exact
from async_opd.tools.probe.figures import PairFigures, figures_of
from async_opd.tools.probe.measuring import Asked, ask_student, ask_teacher, scored
from async_opd.tools.probe.verdict import verdicts
from benchmarks.probe_models import (
    END,
    Recipe,
    TorchModel,
    accuracy,
    answers_of,
    digits,
    prompts_of,
    train,
)
from benchmarks.probe_run import GREEDY, SAMPLED, TEACHER, distil

PROMPTS, EVALUATED = 256, 1024
GAIN = 0.02
"""Least gain of accuracy that counts as one."""
STUDENTS = {"weak": 0.1, "middle": 0.4, "strong": 0.8}
KINDS: dict[str, dict[str, Any]] = {
    "expert": {},
    "fair": {"good": 0.65},
    "poor": {"good": 0.25},
    "equal": {"good": STUDENTS["middle"], "rate": 1e-3},
    "random": {"steps": 0},
    "other task": {},
    "by heart": {"good": 1, "steps": 350, "most": 200},
    "own template": {"template": "own"},
    "both templates": {"template": "both"},
    "marked": {"template": "marked", "steps": 250, "good": 1},
}
WRONG = {"own template", "marked"}
"""Teachers that were trained with other prompts, or another beginning, than the run gives them."""
PLAN = (
    *(("weak", kind) for kind in ("expert", "fair", "poor", "by heart")),
    *(("middle", kind) for kind in KINDS if kind not in ("by heart", "poor")),
    *(("strong", kind) for kind in ("expert", "fair", "own template")),
    ("random", "expert"),
)
OTHER = {"reverse": "sort", "sort": "reverse"}


@dataclass(frozen=True)
class Pair:
    """A student and a teacher of a task."""

    task: str
    student: str
    teacher: str


PAIRS = [Pair(task, *names) for task in OTHER for names in PLAN]


@dataclass(frozen=True)
class Result:
    """Accuracies are shares of ``EVALUATED`` prompts, seconds those of this process's CPU time."""

    pair: Pair
    figures: dict[str, Any]
    kind: str
    score: float
    before: float
    after: float
    probe_s: float
    step_s: float
    seconds: float
    """With the training of the models that were not there."""

    @property
    def gain(self) -> float:
        """Accuracy after distillation minus before."""
        return self.after - self.before


class Models:
    """Trained models, kept on the disk by their recipes."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        folder.mkdir(parents=True, exist_ok=True)

    def get(self, recipe: Recipe) -> Any:
        """The model, trained now if it is not there."""
        name = "-".join(str(value) for value in vars(recipe).values())
        file = self._folder / f"{name}.pt"
        if file.exists():
            model = train(replace(recipe, steps=0))
            model.load_state_dict(torch.load(file, weights_only=True))
            return model
        model = train(recipe)
        torch.save(model.state_dict(), file)
        return model


def recipes(pair: Pair, seed: int) -> tuple[Recipe, Recipe]:
    """How the student and the teacher of a pair are trained."""
    base = 1000 * seed + 100 * list(OTHER).index(pair.task)
    if pair.student == "random":
        student = Recipe(pair.task, base + 90, steps=0)
    else:
        at = base + 10 + list(STUDENTS).index(pair.student)
        student = Recipe(pair.task, at, good=STUDENTS[pair.student], rate=1e-3)
    task = OTHER[pair.task] if pair.teacher == "other task" else pair.task
    teacher = Recipe(task, base + 20 + list(KINDS).index(pair.teacher), **KINDS[pair.teacher])
    return student, teacher


async def probe(pair: Pair, student: Any, teacher: Any, seed: int) -> PairFigures:
    """The figures that ``async_opd probe`` shows of the pair."""
    shown = digits(PROMPTS, 7000 + seed)
    answers = {
        Uid(f"q:{at}#0"): Row(f"q:{at}", pair.task, "", "".join(map(str, ids[:-1])), {})
        for at, ids in enumerate(answers_of(pair.task, shown).tolist())
    }

    async def grade(rollout: Rollout) -> float:
        response = "".join(str(i) if i < END else "?" for i in rollout.response_ids.tolist()[:-1])
        response += "" if rollout.response_ids[-1] == END else "?"
        return exact(response, answers[rollout.prompt.uid])

    def read(wrapped: bool) -> Any:
        return prompts_of(pair.task, shown, wrapped).astype(np.int32)

    prompts = [
        Prompt(uid, pair.task, TEACHER, ids)
        for uid, ids in zip(answers, read(wrapped=False), strict=True)
    ]
    other = None
    if pair.teacher in ("own template", "both templates"):
        seen = zip(prompts, read(wrapped=True), strict=True)
        other = [replace(prompt, teacher_ids=ids) for prompt, ids in seen]
    asked = Asked(prompts, GREEDY, SAMPLED, grade, other)
    asking, scoring = TorchModel(student, seed), TorchModel(teacher, seed)
    found = await ask_student(asking, asked)
    own = await scored(asking, found.rollouts)
    return figures_of(await ask_teacher(scoring, asked, found, own, (pair.task, pair.teacher)))


def run(pair: Pair, models: Models, seed: int, steps: int) -> Result:
    """Probes the pair, then distils it."""
    begun = time.process_time()
    student, teacher = map(models.get, recipes(pair, seed))
    shown = digits(EVALUATED, 8000 + seed)
    started = time.process_time()
    figures = asyncio.run(probe(pair, student, teacher, seed))
    (verdict,) = verdicts([figures])
    probed = time.process_time()
    ids = prompts_of(pair.task, digits(4096, 9000 + seed))
    trained = asyncio.run(distil(student, teacher, ids, steps, seed))
    ended = time.process_time()
    assert verdict.score is not None
    return Result(
        pair,
        asdict(figures),
        verdict.kind,
        verdict.score,
        accuracy(student, pair.task, shown),
        accuracy(trained, pair.task, shown),
        probed - started,
        (ended - probed) / steps,
        ended - begun,
    )


def spearman(one: Sequence[float], other: Sequence[float]) -> float | None:
    """The rank correlation, -1 to 1, of three values or more; equal values have their mean rank."""
    if len(one) < 3:
        return None
    first, second = (_ranks(np.asarray(values)) for values in (one, other))
    return float(np.corrcoef(first, second)[0, 1])


def _ranks(values: np.ndarray[Any, Any]) -> Any:
    below = (values[:, None] > values).sum(1)
    return below + ((values[:, None] == values).sum(1) - 1) / 2


def summary(results: Sequence[Result]) -> dict[str, float]:
    """See the module."""
    gained = [one for one in results if one.gain >= GAIN]
    wrong = {one.pair for one in results if one.pair.teacher in WRONG}
    called = {one.pair for one in results if one.kind == "wrong_template"}
    seconds = [sum(getattr(one, name) for one in results) for name in ("probe_s", "step_s")]
    shares = {
        "spearman": spearman([one.score for one in results], [one.gain for one in results]),
        "spearman_gain": spearman([one.score for one in gained], [one.gain for one in gained]),
        "templates_found": len(wrong & called) / len(wrong | called) if wrong | called else None,
    }
    return {name: share for name, share in shares.items() if share is not None} | {
        "cost_share": seconds[0] / (1000 * seconds[1]),
        "pairs": len(results),
        "pairs_with_gain": len(gained),
        "seconds": sum(one.seconds for one in results),
    }


def table(results: Sequence[Result]) -> str:
    """The results as Markdown."""
    head = ("task", "student", "teacher", "teacher's", "before", "after", "gain", "score")
    head += ("shared", "reach", "forward KL", "verdict")
    rows = [f"| {' | '.join(head)} |", f"|{'---|' * len(head)}"]
    for one in results:
        found, pair = one.figures, one.pair
        shares = (found["teacher_accuracy"]["mean"], one.before, one.after)
        cells = [pair.task, pair.student, pair.teacher, *(f"{share:.1%}" for share in shares)]
        cells += [f"{one.gain:+.3f}", f"{one.score:+.3f}"]
        cells += [f"{found[name]:.2f}" for name in ("shared", "reach", "forward")]
        rows.append(f"| {' | '.join([*cells, one.kind])} |")
    return "\n".join(rows)


def numbers(ranges: Sequence[str]) -> list[int]:
    """Of pairs: ``1-3 7`` are 1, 2, 3 and 7."""
    ends = [one.partition("-") for one in ranges]
    return [n for first, _, last in ends for n in range(int(first), int(last or first) + 1)]


def main() -> None:
    """Makes the pairs that are missing, and prints all that are asked for."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--pairs", nargs="+", default=[f"1-{len(PAIRS)}"], metavar="A-B")
    parser.add_argument("--steps", type=int, default=120, help="of distillation")
    default = Path(gettempdir()) / "async_opd-benchmark-probe"
    parser.add_argument("--cache", type=Path, default=default)
    given = parser.parse_args()
    torch.set_num_threads(1)
    folder = given.cache / f"seed{given.seed}-{given.steps}"
    models, results = Models(folder / "models"), []
    for number in numbers(given.pairs):
        file = folder / f"pair{number}.json"
        if not file.exists():
            result = run(PAIRS[number - 1], models, given.seed, given.steps)
            file.write_text(json.dumps(asdict(result)))
            print(f"{number}: {result.pair} {result.kind}", flush=True)
        kept = json.loads(file.read_text())
        results.append(Result(**kept | {"pair": Pair(**kept["pair"])}))
    print(table(results))
    print(json.dumps(summary(results)))


if __name__ == "__main__":
    main()
