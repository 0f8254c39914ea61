"""Draw pictures with questions and write them as parquet; train the example's tiny models.

    python examples/vision/make.py [--out DIR] [--train N] [--eval N] [--models] [--verify]

Writes DIR/data/train.parquet and eval.parquet with N rows of each task (count, larger and digit
with a picture, sort without); no row is in both. That takes a few seconds on one CPU core. The
models are committed; `--models` trains them again, in at most ten minutes. `--verify` compares
their files with the digests in `MANIFEST.json` and measures the models again.
"""

import argparse
import hashlib
import itertools
import json
import platform
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import pictures
import pyarrow as arrow
import pyarrow.parquet as parquet
import sorting

SEEDS = {"count": 1, "larger": 2, "digit": 3}
ROW_ORDER_SEED = 4
IMAGES = arrow.list_(arrow.struct([("bytes", arrow.binary()), ("path", arrow.string())]))
TEXTS = ("prompt", "answer", "data_source")

TEACHERS = {"teacher-vision": tuple(SEEDS), "teacher-text": (sorting.TASK,)}
MODEL_SEEDS = {"teacher-vision": 11, "teacher-text": 12, "student": 13}
TEACHER_STEPS = {"teacher-vision": 600, "teacher-text": 300}
STUDENT_MAX_STEPS = 400
LR = 3e-3
TEACHER_FLOOR, STUDENT_CEILING = 0.95, 0.38
MEASURED = 512
"""Questions of each task by which the saved models are measured; they are in no file."""


def write(file: Path, tables: list[arrow.Table]) -> None:
    """Write the rows of all tasks in a random order, the same one every time."""
    table = arrow.concat_tables(tables)
    order = np.random.default_rng(ROW_ORDER_SEED).permutation(table.num_rows)
    parquet.write_table(table.take(order), file, row_group_size=512)
    print(f"{file}: {table.num_rows} rows, {file.stat().st_size / 2**20:.1f} MiB")


def rows(number: int) -> Iterator[list[dict[str, Any]]]:
    """So many rows of each task."""
    for task, seed in SEEDS.items():
        yield list(pictures.rows(task, number, seed))
    yield list(sorting.rows(number))


def write_data(out: Path, train: int, evaluation: int) -> None:
    """Make the rows of each task at once, so that none is in both files, and write them."""
    out.mkdir(parents=True, exist_ok=True)
    schema = arrow.schema([*((name, arrow.string()) for name in TEXTS), ("images", IMAGES)])
    tables = [arrow.Table.from_pylist(some, schema) for some in rows(train + evaluation)]
    write(out / "eval.parquet", [table.slice(0, evaluation) for table in tables])
    write(out / "train.parquet", [table.slice(evaluation) for table in tables])


def train_models(out: Path) -> None:
    """Train and save the models; `MANIFEST.json` says what was made, and how good it is."""
    from async_opd.models import torchvision_operators

    torchvision_operators.install()  # before transformers imports torchvision
    import supervised
    import tiny
    import torch
    import transformers

    def report(name: str) -> supervised.Report:
        return lambda step, note: print(f"{name}: step {step}, {note}", file=sys.stderr, flush=True)

    started = time.perf_counter()
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)
    transformers.utils.logging.disable_progress_bar()
    band = supervised.Band()
    student = tiny.vision_model(MODEL_SEEDS["student"])
    supervised.train_student(
        student, MODEL_SEEDS["student"], STUDENT_MAX_STEPS, LR / 3, band, report("student")
    )
    tiny.save(student, out / "student")
    for name, tasks in TEACHERS.items():
        kind = tiny.text_model if tasks == (sorting.TASK,) else tiny.vision_model
        seed, steps = MODEL_SEEDS[name], TEACHER_STEPS[name]
        model = kind(seed)
        supervised.train_teacher(model, tasks, seed, steps, LR, report(name))
        tiny.save(model, out / name)
    accuracies = measure(out)
    manifest = {
        "made_by": "examples/vision/make.py --models",
        "weights": "bfloat16, measured in float32",
        "accuracy": accuracies,
        "questions_a_task": MEASURED,
        "seeds": MODEL_SEEDS,
        "teacher_steps": TEACHER_STEPS,
        "student_band": asdict(band),
        "versions": {
            "python": platform.python_version(),
            "torch": torch.__version__,
            "transformers": transformers.__version__,
        },
        "seconds": round(time.perf_counter() - started, 1),
        "sha256": digests(out),
    }
    (out / "MANIFEST.json").write_text(json.dumps(manifest, indent=2) + "\n", encoding="utf-8")
    print(json.dumps(accuracies, indent=2))
    check(accuracies)


def measure(models: Path) -> dict[str, dict[str, float]]:
    """The accuracy of each saved model on each of its tasks."""
    import supervised
    import tiny

    asked = supervised.held_out(supervised.TASKS, MEASURED, seed=98)
    return {
        name: supervised.measure(
            tiny.load(models / name), {task: asked[task] for task in TEACHERS.get(name, asked)}
        )
        for name in MODEL_SEEDS
    }


def digests(models: Path) -> dict[str, str]:
    """The SHA-256 of every file of the models."""
    files = [file for file in sorted(models.rglob("*.*")) if file.name != "MANIFEST.json"]
    return {
        str(file.relative_to(models.parent)): hashlib.sha256(file.read_bytes()).hexdigest()
        for file in files
    }


def verify(models: Path) -> None:
    """RuntimeError if a file is not the one that was made, or a model is not good enough."""
    from async_opd.models import torchvision_operators

    torchvision_operators.install()  # before transformers imports torchvision
    made = json.loads((models / "MANIFEST.json").read_text(encoding="utf-8"))
    if digests(models) != made["sha256"]:
        raise RuntimeError(f"{models}: the files have other digests → make them with --models")
    check(measure(models))
    print(f"{models}: the files are those that were made, and the models as good")


def check(accuracies: dict[str, dict[str, float]]) -> None:
    """Refuse teachers that are not good enough, or a student that already is."""
    for name, task in itertools.chain.from_iterable(
        ((name, task) for task in tasks) for name, tasks in TEACHERS.items()
    ):
        teacher, student = accuracies[name][task], accuracies["student"][task]
        if teacher < TEACHER_FLOOR:
            raise RuntimeError(f"{name} has an accuracy of {teacher:.1%} on {task}")
        if student > STUDENT_CEILING * teacher:
            raise RuntimeError(f"the student has an accuracy of {student:.1%} on {task}")


def main() -> int:
    """Parse the command line and make what it asks for."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    here = Path(__file__).resolve().parent
    parser.add_argument("--out", type=Path, default=here, help="default: beside this script")
    parser.add_argument("--train", type=int, default=2000, help="rows of each task to train on")
    parser.add_argument("--eval", type=int, default=128, help="rows of each task to evaluate on")
    parser.add_argument("--models", action="store_true", help="train the models too")
    parser.add_argument("--verify", action="store_true", help="measure the models that are there")
    options = parser.parse_args()
    if options.verify:
        verify(options.out / "models")
        return 0
    write_data(options.out / "data", options.train, options.eval)
    if options.models:
        train_models(options.out / "models")
    return 0


if __name__ == "__main__":
    sys.exit(main())
