"""``async_opd eval CONFIG MODEL|RUN_DIR``: a model on the evaluation prompts of a config, alone.

    model ──► engines that only evaluate ──► Evaluation, as in a run ──► table
                                                   └──► answers.jsonl, result.json

A teacher is evaluated like a student, with its own engine's settings and prompt template.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from async_opd.config.overrides import TRUST, add_overrides, add_trust, load_given
from async_opd.config.run_config import RunConfig
from async_opd.config.secrets import Redactor
from async_opd.core.errors import ConfigError, Problem
from async_opd.core.printable import escaped, indented, on_one_line
from async_opd.files.foreign import foreign
from async_opd.processes.output import write_stderr
from async_opd.tools.evaluated_model import evaluation_config, exported

if TYPE_CHECKING:
    from async_opd.prepare import Prepared

ANSWERS, RESULT, MODEL = "answers", "result.json", "model"


def add_eval(parser: argparse.ArgumentParser) -> None:
    """Evaluates one model on data.eval of a config, with the graders and the metrics of a run.

    It is a model's directory, the final model of a run directory, one of its checkpoints, or with
    --teacher a teacher of the config. Starts only the engines that answer. Writes the answers and
    the metrics into a directory; of a checkpoint also its model, with adapters merged.

      async_opd eval config.yaml runs/quickstart eval.n=4 eval.temperature=0.7
      async_opd eval config.yaml runs/quickstart/checkpoints/step_160
      async_opd eval config.yaml --teacher sort --json
    """
    parser.add_argument("config", help="YAML file, whose data.eval and eval sections count")
    what = "directory of a model, a run or a checkpoint; by default the config's student"
    parser.add_argument("model", nargs="?", metavar="MODEL|RUN_DIR", help=what)
    add_overrides(parser, "eval.max_prompts=100")
    parser.add_argument("--teacher", metavar="NAME", help="evaluates this teacher of the config")
    what = "directory for the results (default: runs/NAME-eval-DATE)"
    parser.add_argument("--out", metavar="DIR", help=what)
    parser.add_argument("--json", action="store_true", help="print one JSON document instead")
    add_trust(parser, "MODEL has, or its run directory names")
    parser.set_defaults(command=_evaluate)


def _evaluate(given: argparse.Namespace) -> int:
    from async_opd.checkpoint.store import MANIFEST

    words = [*([] if given.model is None else [given.model]), *given.overrides]
    models = [word for word in words if "=" not in word or Path(word).exists()]
    if len(models) > 1:
        raise ConfigError.of("MODEL", f"found {', '.join(models)}", "name one model")
    given.overrides = [word for word in words if word not in models]
    config = load_given(given)
    out = Path(given.out or f"runs/{config.name}-eval-{time.strftime('%Y%m%d-%H%M%S')}")
    model = models[0] if models else None
    if model is not None and config.student.trust_remote_code and not given.trust_remote_code:
        message = f"the config trusts the code of its student, which {model} may not have"
        remedy = f"read its *.py, then add {TRUST}: it permits that code"
        raise ConfigError.of("MODEL", message, remedy)
    if model is not None and (foreign(Path(model)) / MANIFEST).is_file():
        model = exported(Path(model), out / MODEL, given.trust_remote_code)
    evaluated = evaluation_config(config, model, given.teacher)
    metrics = evaluate(config, evaluated, given.config, given.teacher, out)
    if given.json:
        print(json.dumps(metrics, indent=2, allow_nan=False))
    else:
        _show(metrics, out)
    return 0


def evaluate(
    config: RunConfig, evaluated: RunConfig, where: str, teacher: str | None, out: Path
) -> dict[str, float]:
    """Checks, evaluates and writes the results. ConfigError before an engine starts."""
    import uvloop

    from async_opd.checks.memory_fit import with_defaults
    from async_opd.data.teacher_prompts import teacher_readers
    from async_opd.files.safe_open import make_folder, private_files, write_atomically
    from async_opd.grading.evaluation_set import evaluation_of
    from async_opd.models.tokenizer import Text
    from async_opd.pictures import MEDIA, Thumbnails
    from async_opd.prepare import check_inputs
    from async_opd.tools.engines import ToolEngines

    # a teacher need not be a model that can be trained
    ready = check_inputs(evaluated if teacher is None else config, where, fetch=True, load=True)
    config, inputs, device = ready.config, ready.inputs, ready.device
    redacted = Redactor(config.model_dump(mode="json", by_alias=True))
    for note in inputs.notes:
        _say(redacted(note))
    evaluated = config if teacher is None else evaluation_config(config, None, teacher)
    if problems := _problems(ready, evaluated, where):
        raise ConfigError(problems)
    text = Text.of(evaluated if teacher is None else config)
    evaluated = with_defaults(evaluated, device)
    rows = [
        [row for row in own if teacher in (None, evaluated.teacher_of(row.data_source))]
        for own in inputs.eval
    ]
    with private_files():
        make_folder(out)
        readers = {} if teacher is None else teacher_readers(config, text)
        pictures = Thumbnails(out / MEDIA, int(evaluated.log.thumbnails_mib * (1 << 20)))
        limit = inputs.max_eval_prompt_tokens
        made = evaluation_of(evaluated, rows, text, out, readers, limit, pictures)
        if made is None:
            message = f"data.eval has no prompts for teacher {teacher}"
            raise ConfigError.of("data.eval", message, "add some", where)
        engines = ToolEngines(device, text.response_ends(), _say)
        measured = uvloop.run(engines.evaluated(evaluated, made, ANSWERS, teacher is not None))
        metrics: dict[str, float] = measured.metrics
        write_atomically(out / RESULT, json.dumps(metrics, indent=2, allow_nan=False) + "\n")
    return metrics


def _problems(ready: Prepared, evaluated: RunConfig, where: str) -> list[Problem]:
    """Why the engines that answer would not start, or have nothing to answer."""
    from async_opd.checks.resources import gpu_count, pools
    from async_opd.memory.pools import EVAL

    others = {"cluster", "train", *(f"teachers.{name}" for name in ready.config.teachers)}
    problems = [problem for problem in ready.inputs.problems if problem.key not in others]
    needed = next(pool.gpus for pool in pools(evaluated) if pool.name == EVAL)
    refused = any(problem.key == "cluster.device" for problem in problems)
    if ready.device == "cuda" and not (evaluated.cluster.joins or refused) and needed > gpu_count():
        message = (
            f"the engines take {needed} GPU{'s' * (needed > 1)}, this machine has {gpu_count()}"
        )
        problems.append(Problem(where, "cluster", message, "take fewer replicas"))
    if not ready.inputs.eval and not problems:
        message = "no source of prompts to evaluate on"
        problems.append(Problem(where, "data.eval", message, "name a file"))
    return problems


def _say(text: str) -> None:
    write_stderr(indented(text))


def _show(metrics: Mapping[str, float], out: Path) -> None:
    """Prints a row for each data source, a column for each metric."""
    from rich.table import Table

    from async_opd.observability.terminal import table_terminal

    rows: dict[str, dict[str, float]] = {}
    for key, value in metrics.items():
        source, _, name = key.removeprefix("eval/").rpartition("/")
        if source:
            rows.setdefault(source, {})[name] = value
    names = list(dict.fromkeys(name for row in rows.values() for name in row))
    shown = [name for name in names if not name.endswith("_stderr")]
    table = Table("data source", *map(escaped, shown))
    for source, row in rows.items():
        table.add_row(on_one_line(source), *(_cell(row, name) for name in shown))
    table_terminal().print(table)
    print(on_one_line(f"results     {out}"))


def _cell(row: Mapping[str, float], name: str) -> str:
    """The value, with its standard error if there is one."""
    if name not in row:
        return ""
    error = row.get(f"{name}_stderr")
    return f"{row[name]:.4g}" + ("" if error is None else f" ± {error:.2g}")
