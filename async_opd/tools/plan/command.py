"""``async_opd plan``: a config or a run directory in, a prediction and advice out."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from async_opd.config.load import load_config
from async_opd.config.overrides import add_config, all_overrides
from async_opd.config.run_config import RunConfig
from async_opd.config.sections.plan import PlanConfig
from async_opd.config.yaml_text import dump_yaml
from async_opd.core.printable import escaped, on_one_line
from async_opd.files.foreign import foreign
from async_opd.files.safe_open import write_atomically
from async_opd.tools.plan.advice import Advice, advise, current
from async_opd.tools.plan.chart import draw_charts
from async_opd.tools.plan.inputs import required_plan, setting_of
from async_opd.tools.plan.measure.measured import MeasuredRates, read_run
from async_opd.tools.plan.prediction import Prediction
from async_opd.tools.plan.setting import Setting
from async_opd.tools.plan.sim.simulation import predict
from async_opd.tools.plan.table import show

ABOUT = """\
Predicts throughput and staleness, and advises how many GPUs each pool should have and which
staleness threshold is enough. The speeds come from the config's plan section, or from a finished
run. Draws a chart into plan.svg.

  async_opd plan config.yaml --gpus 64
  async_opd plan runs/quickstart rollout.n=8 --json
"""


def add_plan(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments of ``async_opd plan``."""
    parser.description = ABOUT
    add_config(parser, "YAML file with a plan section, or a run directory")
    what = "GPUs to split among the pools (default: as many as the config uses)"
    parser.add_argument("--gpus", type=int, metavar="N", help=what)
    what = "directory for plan.svg (default: runs/, or the run directory)"
    parser.add_argument("--out", metavar="DIR", help=what)
    parser.add_argument("--json", action="store_true", help="print one JSON document instead")
    parser.set_defaults(command=_plan)


def _plan(given: argparse.Namespace) -> int:
    overrides = all_overrides(given)
    plan(given.config, overrides, gpus=given.gpus, out=given.out, as_json=given.json)
    return 0


@dataclass(frozen=True)
class Source:
    """A config with its speeds, and the measured rates if the config is that of a finished run."""

    config: RunConfig
    plan: PlanConfig
    measured: MeasuredRates | None
    where: str
    chart: Path


def plan(
    target: str, overrides: Sequence[str], *, gpus: int | None, out: str | None, as_json: bool
) -> None:
    """Predicts and advises; prints both and draws the chart. ConfigError with all problems."""
    source = _run(Path(target), overrides) if Path(target).is_dir() else _config(target, overrides)
    setting = setting_of(source.config, source.plan, source.where, gpus)
    advice = advise(setting, setting.gpus if gpus is None else gpus, source.config.seed)
    prediction = predict(setting, seed=source.config.seed)
    file = source.chart if out is None else Path(out) / "plan.svg"
    file.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(file, draw_charts(advice))
    if as_json:
        print(json.dumps(_document(source, setting, prediction, advice, file), indent=2))
        return
    if Path(target).is_dir():
        print("speeds of the run, as a section for a config:\n")
        print(escaped(dump_yaml({"plan": source.plan.model_dump()})))
    show(setting, prediction, source.measured, advice)
    print(on_one_line(f"chart       {file}"))


def _config(file: str, overrides: Sequence[str]) -> Source:
    config = load_config(file, overrides)
    plan_ = required_plan(config, file)
    return Source(config, plan_, None, file, Path("runs") / f"{config.name}-plan.svg")


def _run(run_dir: Path, overrides: Sequence[str]) -> Source:
    """The config of a run, with overrides if given, and the run's measured speeds."""
    run = read_run(run_dir)
    file = foreign(run_dir) / "config.yaml"
    config = load_config(file, overrides, recorded=True)
    same = config == run.config
    measured = run.measured if same else None
    return Source(config, run.plan, measured, str(file), run_dir / "plan.svg")


def _document(
    source: Source, setting: Setting, prediction: Prediction, advice: Advice, file: Path
) -> dict[str, Any]:
    return {
        "prediction": _facts(prediction),
        "measured": None if source.measured is None else asdict(source.measured),
        "plan": source.plan.model_dump(),
        "advice": {
            "gpus": advice.gpus,
            "split_now": asdict(current(setting)),
            "split": asdict(advice.split),
            "teachers": [teacher.name for teacher in setting.teachers],
            "staleness_threshold": advice.threshold,
            "staleness_threshold_now": advice.threshold_now,
            "prediction": _facts(advice.prediction),
            "by_threshold": advice.by_threshold,
            "by_rollout_gpus": advice.by_rollout,
        },
        "chart": str(file),
    }


def _facts(prediction: Prediction) -> dict[str, Any]:
    """All fields of a prediction, and those that it computes from them."""
    pools = {pool.name: asdict(pool) for pool in prediction.pools}
    return {
        **asdict(prediction),
        "mean_staleness": prediction.mean_staleness,
        "bottleneck": prediction.bottleneck.name,
        "pools": {
            name: {k: v for k, v in pool.items() if k != "name"} for name, pool in pools.items()
        },
    }
