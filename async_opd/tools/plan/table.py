"""Prints a plan: a table with the prediction, and one with the advice."""

from __future__ import annotations

from rich.console import Group, RenderableType
from rich.table import Table

from async_opd.observability.terminal import duration, terminal_on
from async_opd.tools.plan.advice import ENOUGH, Advice, current
from async_opd.tools.plan.measure.measured import MeasuredRates
from async_opd.tools.plan.prediction import PoolUse, Prediction
from async_opd.tools.plan.setting import Setting


def show(
    setting: Setting, prediction: Prediction, measured: MeasuredRates | None, advice: Advice
) -> None:
    """Prints prediction and advice."""
    console = terminal_on(None)
    console.print(_prediction(setting, prediction, measured))
    console.print()
    console.print(_advice(setting, advice))


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
    return Group(table, *_facts(prediction, measured))


def _wait(pool: PoolUse) -> str:
    reason = pool.waits_for
    return f"{reason} ({pool.waits[reason]:.0%})" if reason else ""


def _facts(prediction: Prediction, measured: MeasuredRates | None) -> list[str]:
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
