"""Make the quickstart's models and data: two teachers, an under-trained student, six-digit tasks.

    python examples/quickstart/make.py [--out DIR] [--force] [--verify]

Takes about two minutes on one CPU core. The result is committed, so no user has to run this to try
the quickstart; it is here so that everybody can see where the models come from. `--verify` compares
the files with the digests in `MANIFEST.json` and measures the saved models again.
"""

import argparse
import contextlib
import hashlib
import json
import platform
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path

try:
    import rich.console
    import rich.progress
except ImportError:
    rich = None  # type: ignore[assignment]

from async_opd.models import torchvision_operators

torchvision_operators.install()  # before transformers imports torchvision
import tasks  # noqa: E402
import tiny  # noqa: E402
import torch  # noqa: E402
import transformers  # noqa: E402

TEACHER_STEPS = 260
TEACHER_SEEDS = {"sort": 11, "reverse": 12}
TEACHER_FLOOR = 0.97
STUDENT_SEED = 13
STUDENT_MAX_STEPS = 400
STUDENT_CEILING = 0.25
STRANGER_CEILING = 0.10
BAND = tiny.Band()


@contextlib.contextmanager
def progress(label: str, total: int) -> Iterator[tiny.Report]:
    """A progress bar on a terminal that has rich, else one line every fifty steps."""
    if rich is None or not sys.stderr.isatty():

        def plain(done: int, note: str) -> None:
            if done % 50 == 0:
                print(f"{label}: step {done}, {note}", file=sys.stderr, flush=True)

        yield plain
        return
    columns = (
        rich.progress.TextColumn("{task.description:16}"),
        rich.progress.BarColumn(),
        rich.progress.TimeElapsedColumn(),
        rich.progress.TextColumn("{task.fields[note]}"),
    )
    with rich.progress.Progress(*columns, console=rich.console.Console(stderr=True)) as bar:
        job = bar.add_task(label, total=total, note="")
        yield lambda done, note: bar.update(job, completed=done, note=note)
        bar.update(job, total=bar.tasks[0].completed)


def build_models(folder: Path, splits: dict[str, tasks.Split]) -> None:
    """Train and save the teachers and the student, each with the shared tokenizer."""
    tokenizer = tiny.make_tokenizer()
    for task, part in splits.items():
        with progress(f"teacher-{task}", TEACHER_STEPS) as report:
            seed = TEACHER_SEEDS[task]
            model = tiny.train_teacher(task, part, seed, TEACHER_STEPS, report)
        tiny.save(model, tokenizer, folder / f"teacher-{task}")
    with progress("student", STUDENT_MAX_STEPS) as report:
        model = tiny.train_student(splits, STUDENT_SEED, STUDENT_MAX_STEPS, BAND, report)
    tiny.save(model, tokenizer, folder / "student")


def check(accuracies: dict[str, dict[str, float]]) -> None:
    """Refuse teachers that are not good enough, or a student that already is."""
    for name, by_task in accuracies.items():
        for task, value in by_task.items():
            if name == "student":
                fits = value <= STUDENT_CEILING
            elif name == f"teacher-{task}":
                fits = value >= TEACHER_FLOOR
            else:
                fits = value < STRANGER_CEILING
            if not fits:
                raise RuntimeError(f"{name} has an accuracy of {value:.1%} on {task}")


def digests(out: Path) -> dict[str, str]:
    """The SHA-256 of every file of the data and the models."""
    files = [file for part in ("data", "models") for file in sorted((out / part).rglob("*.*"))]
    named = {str(file.relative_to(out)): file for file in files if file.name != "MANIFEST.json"}
    return {name: hashlib.sha256(file.read_bytes()).hexdigest() for name, file in named.items()}


def verify(out: Path) -> None:
    """RuntimeError if a file is not the one that was made, or a model is not good enough."""
    made = json.loads((out / "models" / "MANIFEST.json").read_text(encoding="utf-8"))
    if digests(out) != made["sha256"]:
        raise RuntimeError(f"{out}: the files have other digests → make them again with --force")
    splits = {task: tasks.split(task) for task in tasks.TASKS}
    names = [*(f"teacher-{task}" for task in splits), "student"]
    check({name: tiny.measure(out / "models" / name, splits, "eval") for name in names})
    print(f"{out}: the files are those that were made, and the models as good")


def manifest(
    out: Path,
    eval_accuracy: dict[str, dict[str, float]],
    held_out_accuracy: dict[str, dict[str, float]],
    seconds: float,
) -> dict[str, object]:
    """The models and files made, their seeds and versions, and their quality."""
    return {
        "made_by": "examples/quickstart/make.py",
        "weights": "bfloat16, measured in float32",
        "accuracy_on_eval": eval_accuracy,
        "accuracy_on_held_out": held_out_accuracy,
        "prompts_a_task": {"eval": tasks.EVAL_PROMPTS, "held_out": tasks.HELD_OUT_PROMPTS},
        "seeds": {
            "teachers": TEACHER_SEEDS,
            "student": STUDENT_SEED,
            "splits": dict(tasks.SPLIT_SEEDS),
            "row_order": tasks.ROW_ORDER_SEED,
        },
        "teacher_steps": TEACHER_STEPS,
        "student_band": asdict(BAND),
        "versions": {
            "python": platform.python_version(),
            "torch": torch.__version__,
            "transformers": transformers.__version__,
        },
        "seconds": round(seconds, 1),
        "sha256": digests(out),
    }


def build(out: Path) -> None:
    """Make everything below `out`; `MANIFEST.json` comes last, so its presence means complete."""
    started = time.perf_counter()
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)
    hide_weight_bars: Callable[[], None] = transformers.utils.logging.disable_progress_bar
    hide_weight_bars()
    models = out / "models"
    target = models / "MANIFEST.json"
    target.unlink(missing_ok=True)
    tasks.write_data(out / "data")
    splits = {task: tasks.split(task) for task in tasks.TASKS}
    build_models(models, splits)
    names = [*(f"teacher-{task}" for task in splits), "student"]
    on_eval = {name: tiny.measure(models / name, splits, "eval") for name in names}
    on_held_out = {name: tiny.measure(models / name, splits, "held_out") for name in names}
    check(on_eval)
    seconds = time.perf_counter() - started
    made = manifest(out, on_eval, on_held_out, seconds)
    target.write_text(json.dumps(made, indent=2) + "\n", encoding="utf-8")
    for name, by_task in on_eval.items():
        print(f"{name:16}", "  ".join(f"{task} {value:6.1%}" for task, value in by_task.items()))
    print(f"made in {seconds:.0f} s: {out}")


def main() -> int:
    """Parse the command line, and build unless everything is there already."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    here = Path(__file__).resolve().parent
    parser.add_argument("--out", type=Path, default=here, help="default: beside this script")
    parser.add_argument("--force", action="store_true", help="make again what is there already")
    parser.add_argument("--verify", action="store_true", help="measure what is there already")
    options = parser.parse_args()
    if options.verify:
        verify(options.out)
        return 0
    if (options.out / "models" / "MANIFEST.json").exists() and not options.force:
        print(f"{options.out} is complete; --force makes it again")
        return 0
    build(options.out)
    return 0


if __name__ == "__main__":
    sys.exit(main())
