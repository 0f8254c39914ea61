"""``async_opd plan``: a config or a run directory in, tables of a prediction and of advice out."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table

from async_opd.config.load import load_config
from async_opd.config.overrides import add_config, all_overrides
from async_opd.config.run_config import RunConfig
from async_opd.config.sections.plan import PlanConfig
from async_opd.config.yaml_text import dump_yaml
from async_opd.core.printable import escaped, on_one_line
from async_opd.files.absent import refuse_absent
from async_opd.files.foreign import foreign
from async_opd.files.safe_open import write_atomically
from async_opd.observability.terminal import duration, terminal_on
from async_opd.queue.sizes import in_mib
from async_opd.tools.plan.advice import ENOUGH, Advice, advise, current
from async_opd.tools.plan.chart import draw_charts
from async_opd.tools.plan.inputs import required_plan, setting_of
from async_opd.tools.plan.measured import MeasuredRates, read_run
from async_opd.tools.plan.scaling import Arrow, arrows_of, limits
from async_opd.tools.plan.setting import Setting
from async_opd.tools.plan.sim.simulation import PoolUse, Prediction, predict

NOT_DRAWN = 'not drawn: it needs altair → pip install "async-opd[report]"'


def add_plan(parser: argparse.ArgumentParser) -> None:
    """Predicts throughput and staleness, and advises sizes.

    Advice is how many GPUs each pool should have, and which staleness threshold is enough. The
    speeds come from the config's plan section, or from a finished run. Draws a chart into plan.svg,
    if the extra report is installed.

      async_opd plan config.yaml --gpus 64
      async_opd plan runs/quickstart rollout.n=8 --json
    """
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
    refuse_absent(Path(target), "CONFIG|RUN_DIR")
    source = _run(Path(target), overrides) if Path(target).is_dir() else _config(target, overrides)
    setting = setting_of(source.config, source.plan, source.where, gpus)
    advice = advise(setting, setting.gpus if gpus is None else gpus, source.config.seed)
    prediction = predict(setting, seed=source.config.seed)
    file = source.chart if out is None else Path(out) / "plan.svg"
    chart = _drawn(advice, file)
    arrows = arrows_of(source.config, setting)
    if as_json:
        document = _document(source, setting, prediction, advice, chart)
        document["traffic"] = _traffic_facts(setting, prediction, arrows)
        print(json.dumps(document, indent=2))
        return
    if Path(target).is_dir():
        print("speeds of the run, as a section for a config:\n")
        print(escaped(dump_yaml({"plan": source.plan.model_dump()})))
    show(setting, prediction, source.measured, advice, arrows)
    print(on_one_line(f"chart       {chart or NOT_DRAWN}"))


def _drawn(advice: Advice, file: Path) -> str | None:
    """Draws the charts into the file; its path, or None without the extra ``report``."""
    try:
        charts = draw_charts(advice)
    except ImportError:
        return None
    file.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(file, charts)
    return str(file)


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
    source: Source, setting: Setting, prediction: Prediction, advice: Advice, chart: str | None
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
        "chart": chart,
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


def _traffic_facts(
    setting: Setting, prediction: Prediction, arrows: Sequence[Arrow]
) -> dict[str, Any] | None:
    """Bytes and calls of a sample on each arrow, samples/s of each process; None if unknown."""
    if not arrows:
        return None
    each = prediction.samples_per_s / max(setting.gpus, 1)
    found = limits(arrows)
    return {
        "arrows": [asdict(arrow) for arrow in arrows],
        "limits": found,
        "gpus": {name: limit / each for name, limit in found.items()},
    }


def show(
    setting: Setting,
    prediction: Prediction,
    measured: MeasuredRates | None,
    advice: Advice,
    arrows: Sequence[Arrow],
) -> None:
    """Prints prediction, traffic and advice."""
    console = terminal_on(None)
    console.print(_prediction(setting, prediction, measured))
    console.print()
    console.print(_traffic(setting, prediction, arrows))
    console.print()
    console.print(_advice(setting, advice))


def _traffic(setting: Setting, prediction: Prediction, arrows: Sequence[Arrow]) -> RenderableType:
    facts = _traffic_facts(setting, prediction, arrows)
    if facts is None:
        return (
            "traffic     unknown: the files of the student or of a teacher are not on this machine"
        )
    rate = prediction.samples_per_s
    table = Table(title="traffic of a mean sample")
    table.add_column("arrow")
    for name in ("bytes", "calls", "a second"):
        table.add_column(name, justify="right")
    for one in (arrow for arrow in arrows if arrow.nbytes):
        moved = [in_mib(round(one.nbytes)), f"{one.calls:.3g}", in_mib(round(one.nbytes * rate))]
        table.add_row(f"{one.content}: {one.source} → {one.target}", *moved)
    bounds = Table(title="processes of which there is one")
    bounds.add_column("process")
    for name in ("samples/s at most", "of the prediction", "GPUs in this split"):
        bounds.add_column(name, justify="right")
    for name, limit in facts["limits"].items():
        gpus = f"{facts['gpus'][name]:,.0f}" if setting.gpus else ""
        bounds.add_row(name, f"{limit:,.0f}", f"{limit / rate:,.0f} ×", gpus)
    return Group(table, "", bounds)


def _prediction(
    setting: Setting, prediction: Prediction, measured: MeasuredRates | None
) -> RenderableType:
    table = Table(title=f"prediction: {setting.steps} steps of {setting.batch_size} samples")
    table.add_column("pool")
    for name in ("number", "busy", *(("measured",) if measured else ()), "used", "limit"):
        table.add_column(name, justify="right")
    table.add_column("waits most for")
    for pool in prediction.pools:
        cells = [pool.name, str(pool.replicas), f"{pool.busy:.0%}"]
        cells += [f"{measured.busy[pool.name]:.0%}"] if measured else []
        cells += [f"{pool.used:.0%}", f"{pool.limit:.4g}/s", _wait(pool)]
        table.add_row(*cells)
    return Group(table, *_outcome(prediction, measured))


def _wait(pool: PoolUse) -> str:
    reason = pool.waits_for
    return f"{reason} ({pool.waits[reason]:.0%})" if reason else ""


def _outcome(prediction: Prediction, measured: MeasuredRates | None) -> list[str]:
    shares = "  ".join(f"{v}: {share:.0%}" for v, share in prediction.staleness.items())
    queues = "  ".join(f"{topic}: {count:.0f}" for topic, count in prediction.queues.items())
    rate, wall, mean = "", "", ""
    if measured is not None:
        rate = f"   measured {measured.samples_per_s:.4g}"
        wall = f"   measured {duration(measured.wall_s)}" if measured.wall_s is not None else ""
        mean = f"   measured mean {measured.mean_staleness:.2f}"
    return [
        f"samples/s   {prediction.samples_per_s:.4g}{rate}",
        f"wall time   {duration(prediction.wall_s)}, steps {duration(prediction.seconds)}{wall}",
        f"staleness   {shares}   mean {prediction.mean_staleness:.2f}{mean}",
        f"queues      {queues}",
        f"limit       {prediction.bottleneck.name}",
    ]


def _advice(setting: Setting, advice: Advice) -> RenderableType:
    now, then = current(setting), advice.split
    table = Table(title=f"advice for {advice.gpus} GPUs (the config has {setting.gpus})")
    for name in ("pool", "GPUs each", "now", "best", "busy then"):
        table.add_column(name, justify="left" if name == "pool" else "right")
    busy = [f"{pool.busy:.0%}" for pool in advice.prediction.pools]
    each = [setting.rollout.gpus, *(teacher.gpus for teacher in setting.teachers), 1]
    names = [pool.name for pool in advice.prediction.pools]
    counts_now = [now.rollout, *now.teachers, now.ranks]
    counts = [then.rollout, *then.teachers, then.ranks]
    for row in zip(
        names, map(str, each), map(str, counts_now), map(str, counts), busy, strict=True
    ):
        table.add_row(*row)
    scaling = setting.train.scaling
    least = setting.least_ranks
    memory = f"memory      {least} trainer ranks hold the student, {least // 2} do not"
    return Group(
        table,
        *([memory] if least > 1 else []),
        f"samples/s   {advice.prediction.samples_per_s:.4g} at s = {advice.threshold:g}, "
        f"the smallest threshold with {ENOUGH:.0%} of the throughput at a large one",
        f"            split as it is: s = {advice.threshold_now:g} is enough "
        f"(configured: {setting.staleness_threshold:g})",
        f"assumed     r trainer ranks have 1 + {scaling:g}·(r - 1) times the tokens/s of one "
        "(plan.train.scaling);",
        "            every replica has a separate device and keeps the speed given or measured",
    )
