"""``async_opd plan``: a config or a run directory in, a prediction and advice out."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from async_opd.config.load import load_config
from async_opd.config.plan import PlanConfig
from async_opd.config.run_config import RunConfig
from async_opd.config.yaml_text import dump_yaml
from async_opd.core.printable import escaped, on_one_line
from async_opd.files.safe_open import write_atomically
from async_opd.plan.advice import Advice, advise, current
from async_opd.plan.inputs import required_plan, setting_of
from async_opd.plan.measure.measured import MeasuredRates, read_run
from async_opd.plan.picture import picture
from async_opd.plan.prediction import Prediction
from async_opd.plan.setting import Setting
from async_opd.plan.sim.simulation import predict
from async_opd.plan.table import show


@dataclass(frozen=True)
class Source:
    """What is planned: a config, its speeds, and what a run measured if it is the run's config."""

    config: RunConfig
    plan: PlanConfig
    measured: MeasuredRates | None
    where: str
    picture: Path


def plan(
    target: str, overrides: Sequence[str], *, gpus: int | None, out: str | None, as_json: bool
) -> None:
    """Predicts, advises, prints, draws. Raises ConfigError with everything that is wrong."""
    source = _run(Path(target), overrides) if Path(target).is_dir() else _config(target, overrides)
    setting = setting_of(source.config, source.plan, source.where, gpus)
    advice = advise(setting, setting.gpus if gpus is None else gpus, source.config.seed)
    prediction = predict(setting, seed=source.config.seed)
    file = source.picture if out is None else Path(out) / "plan.svg"
    file.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(file, picture(advice))
    if as_json:
        print(json.dumps(_document(source, setting, prediction, advice, file), indent=2))
        return
    if Path(target).is_dir():
        print("speeds of the run, as a section for a config:\n")
        print(escaped(dump_yaml({"plan": source.plan.model_dump()})))
    show(setting, prediction, source.measured, advice)
    print(on_one_line(f"picture     {file}"))


def _config(file: str, overrides: Sequence[str]) -> Source:
    config = load_config(file, overrides)
    plan_ = required_plan(config, file)
    return Source(config, plan_, None, file, Path("runs") / f"{config.name}-plan.svg")


def _run(run_dir: Path, overrides: Sequence[str]) -> Source:
    """Speeds are the run's; what is predicted is its config, or another with overrides."""
    run = read_run(run_dir)
    where = str(run_dir / "config.yaml")
    config = load_config(where, overrides)
    same = config == run.config
    return Source(config, run.plan, run.measured if same else None, where, run_dir / "plan.svg")


def _document(
    source: Source, setting: Setting, prediction: Prediction, advice: Advice, file: Path
) -> dict[str, Any]:
    best = asdict(advice.split)
    return {
        "prediction": _facts(prediction),
        "measured": None if source.measured is None else asdict(source.measured),
        "plan": source.plan.model_dump(),
        "advice": {
            "gpus": advice.gpus,
            "split_now": asdict(current(setting)),
            "split": best,
            "teachers": [teacher.name for teacher in setting.teachers],
            "staleness_threshold": advice.threshold,
            "staleness_threshold_now": advice.threshold_now,
            "prediction": _facts(advice.prediction),
            "by_threshold": advice.by_threshold,
            "by_rollout_gpus": advice.by_rollout,
        },
        "picture": str(file),
    }


def _facts(prediction: Prediction) -> dict[str, Any]:
    return {
        "samples_per_s": prediction.samples_per_s,
        "seconds": prediction.seconds,
        "wall_s": prediction.wall_s,
        "staleness": {str(version): share for version, share in prediction.staleness.items()},
        "mean_staleness": prediction.mean_staleness,
        "bottleneck": prediction.bottleneck.name,
        "pools": {
            pool.name: {
                "replicas": pool.replicas,
                "busy": pool.busy,
                "used": pool.used,
                "limit": pool.limit,
                "waits": dict(pool.waits),
            }
            for pool in prediction.pools
        },
        "queues": dict(prediction.queues),
        "concurrency": prediction.concurrency,
        "batches": dict(prediction.batches),
    }
