"""Make the models and rows of examples/tools.yaml and examples/higher_lower.yaml.

    python examples/episodes/make.py [--out DIR] [--force] [--verify]

Takes about seven minutes on one CPU core. The result is committed, so no user has to run this to
try the examples. `--verify` compares the files with the digests in `MANIFEST.json` and plays with
the saved models again.
"""

import argparse
import hashlib
import json
import platform
import sys
import time
from pathlib import Path

from async_opd.models import torchvision_operators

torchvision_operators.install()  # before transformers imports torchvision
import dialogues  # noqa: E402
import numpy as np  # noqa: E402
import supervised  # noqa: E402
import tiny  # noqa: E402
import torch  # noqa: E402
import transformers  # noqa: E402

STEPS = {
    "tools": {"teacher": 300, "student": 46},
    "higher_lower": {"teacher": 500, "student": 40},
}
MODEL_SEEDS = {"teacher": 11, "student": 13}
LR = 3e-3
ROWS = {"train": 2000, "eval": 135}
ROW_SEEDS = {"train": 1, "eval": 2}
TEACHER_FLOOR, STUDENT_CEILING = 0.95, 0.6


def write_rows(folder: Path, task: dialogues.Task) -> None:
    """Write the rows to train and to evaluate on."""
    folder.mkdir(parents=True, exist_ok=True)
    for part, number in ROWS.items():
        rows = task.rows(number, np.random.default_rng(ROW_SEEDS[part]))
        text = "".join(json.dumps(row) + "\n" for row in rows)
        (folder / f"{part}.jsonl").write_text(text, encoding="utf-8")


def build_models(folder: Path, name: str) -> None:
    """Train and save a task's teacher, and its student, which stops early."""
    task = dialogues.TASKS[name]
    tokenizer = supervised.tokenizer_of(task)
    for role, steps in STEPS[name].items():

        def report(step: int, note: str, label: str = f"{name} {role}") -> None:
            print(f"{label}: step {step}, {note}", file=sys.stderr, flush=True)

        model = tiny.make_model(MODEL_SEEDS[role], len(tokenizer))
        supervised.train(model, tokenizer, task, steps, LR, MODEL_SEEDS[role], report)
        tiny.save(model, tokenizer, folder / role)


def measure(out: Path) -> dict[str, dict[str, float]]:
    """The share of the evaluation's episodes in which each saved model succeeds, greedily."""
    found: dict[str, dict[str, float]] = {}
    for name, task in dialogues.TASKS.items():
        lines = (out / "data" / name / "eval.jsonl").read_text(encoding="utf-8").splitlines()
        rows = list(map(json.loads, lines))
        found[name] = {}
        for role in STEPS[name]:
            model, tokenizer = tiny.load(out / "models" / name / role)
            succeeded = supervised.play(model, tokenizer, task, rows)
            found[name][role] = round(sum(succeeded) / len(rows), 4)
    return found


def check(success: dict[str, dict[str, float]]) -> None:
    """Refuse teachers that are not good enough, or a student that already is."""
    for name, by_role in success.items():
        if by_role["teacher"] < TEACHER_FLOOR or by_role["student"] > STUDENT_CEILING:
            raise RuntimeError(f"{name}: the models succeed in {by_role} of their episodes")


def digests(out: Path) -> dict[str, str]:
    """The SHA-256 of every file of the data and the models."""
    files = [file for part in ("data", "models") for file in sorted((out / part).rglob("*.*"))]
    named = {str(file.relative_to(out)): file for file in files if file.name != "MANIFEST.json"}
    return {name: hashlib.sha256(file.read_bytes()).hexdigest() for name, file in named.items()}


def build(out: Path) -> None:
    """Make everything below `out`; `MANIFEST.json` comes last, so its presence means complete."""
    started = time.perf_counter()
    target = out / "models" / "MANIFEST.json"
    target.unlink(missing_ok=True)
    for name, task in dialogues.TASKS.items():
        write_rows(out / "data" / name, task)
        build_models(out / "models" / name, name)
    success = measure(out)
    check(success)
    made = {
        "made_by": "examples/episodes/make.py",
        "weights": "bfloat16, measured in float32",
        "success_on_eval": success,
        "seeds": {"models": MODEL_SEEDS, "rows": ROW_SEEDS},
        "steps": STEPS,
        "versions": {
            "python": platform.python_version(),
            "torch": torch.__version__,
            "transformers": transformers.__version__,
        },
        "seconds": round(time.perf_counter() - started, 1),
        "sha256": digests(out),
    }
    target.write_text(json.dumps(made, indent=2) + "\n", encoding="utf-8")
    print(json.dumps(success, indent=2))


def verify(out: Path) -> None:
    """RuntimeError if a file is not the one that was made, or a model is not good enough."""
    made = json.loads((out / "models" / "MANIFEST.json").read_text(encoding="utf-8"))
    if digests(out) != made["sha256"]:
        raise RuntimeError(f"{out}: the files have other digests → make them again with --force")
    check(measure(out))
    print(f"{out}: the files are those that were made, and the models as good")


def main() -> int:
    """Parse the command line, and build unless everything is there already."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    here = Path(__file__).resolve().parent
    parser.add_argument("--out", type=Path, default=here, help="default: beside this script")
    parser.add_argument("--force", action="store_true", help="make again what is there already")
    parser.add_argument("--verify", action="store_true", help="measure what is there already")
    options = parser.parse_args()
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)
    transformers.utils.logging.disable_progress_bar()
    if options.verify:
        verify(options.out)
    elif (options.out / "models" / "MANIFEST.json").exists() and not options.force:
        print(f"{options.out} is complete; --force makes it again")
    else:
        build(options.out)
    return 0


if __name__ == "__main__":
    sys.exit(main())
