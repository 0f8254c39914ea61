"""``async_opd run --dry-run``: where a run would begin and what it would write, or all problems."""

from __future__ import annotations

from pathlib import Path

from async_opd.accounting.journal import LEDGER
from async_opd.accounting.lineage import is_on_the_way
from async_opd.checkpoint.earlier_run import (
    is_completed,
    left_in,
    newest_mirrored,
    refuse_another,
    refuse_begun,
    refuse_mirrored,
)
from async_opd.checkpoint.resume import IDENTITY, identity
from async_opd.checkpoint.store import FOLDER, Checkpoints
from async_opd.config.device_defaults import resolved
from async_opd.config.run_config import RunConfig
from async_opd.config.secrets import Redactor
from async_opd.core.printable import escaped, on_one_line
from async_opd.data.hub import with_cached_data
from async_opd.data.mixture import with_steps
from async_opd.data.template_date import with_template_date
from async_opd.files.kept_steps import KEPT
from async_opd.files.origin import ORIGIN
from async_opd.files.run_format import FORMAT_FILE, refuse_other_formats
from async_opd.grading.evaluation_files import EVALS
from async_opd.microscope import MICROSCOPE
from async_opd.models.hub import named_models, with_cached
from async_opd.observability.live.live_file import LIVE_FILE
from async_opd.observability.run_log import METRICS, RUN_LOG, SUMMARY
from async_opd.observability.trace import TRACE
from async_opd.prepare import Prepared
from async_opd.tools.check import check


def dry_run(config: RunConfig, where: str, redacted: Redactor, resume: bool) -> None:
    """Prints what ``check`` prints, where the run would begin, and what it would write.

    Nothing is written, downloaded or started; code that the config names is imported, as by the
    run. ConfigError with all problems; also for a run directory in which the run could not begin,
    or with ``resume`` go on.
    """
    dated = with_template_date(with_cached(config, [])[0], resume).data.template_date
    data = config.data.model_copy(update={"template_date": dated})
    config = config.model_copy(update={"data": data})  # the rows that are left depend on it
    ready = check(config, where, redacted, load=True, resume=resume)
    if config.checkpoint.mirror is not None and not resume:
        refuse_mirrored(config.checkpoint.mirror)
    if config.run_dir is not None and not resume:
        refuse_begun(Path(config.run_dir).absolute())
    elif config.run_dir is not None:
        print(on_one_line(_resumed(config, ready, where, Path(config.run_dir).absolute())))
    named = config.run_dir or f"runs/{config.name}-DATE"
    print(escaped(redacted(f"the run would write {named}/: {', '.join(outputs(ready.config))}")))


def _resumed(config: RunConfig, ready: Prepared, where: str, run_dir: Path) -> str:
    """Where a resumed run would go on, in words. ConfigError for a run of another config."""
    mirror = config.checkpoint.mirror
    if left_in(run_dir) or (run_dir / FORMAT_FILE).exists():
        refuse_other_formats(run_dir)
    local, _ = with_cached_data(with_cached(config, [])[0], where, [])
    sources = [*local.data.train, *local.data.eval]
    if any(one.is_hub_id for one in named_models(local)) or any(one.absent for one in sources):
        return f"{run_dir} is compared with the config after the downloads of the run"
    local = with_steps(with_template_date(local, resume=True), ready.inputs.train)
    now = identity(resolved(local, ready.device), ready.inputs.checked)
    refuse_another(run_dir, now)
    if is_completed(run_dir):
        return f"{run_dir} is completed already"
    store = Checkpoints(run_dir / FOLDER, 1)
    way, lineages = store.lineage(), store.lineages().items()
    left = {step for step, its in lineages if not is_on_the_way(step, its, way)}
    step = max({0, *store.steps()} - left)
    newest = 0 if mirror is None else newest_mirrored(mirror, run_dir)
    if newest > step:
        return (
            f"the run takes step {newest} from {mirror}, if it is whole, and would go on after it"
        )
    return f"the run would go on after step {step} of {config.train.steps}"


def outputs(config: RunConfig) -> list[str]:
    """The files and folders of the run directory of a run that completes without a fault."""
    log = config.log
    optional = {
        EVALS: bool(config.data.eval) and config.eval.samples_mib > 0,
        MICROSCOPE: log.microscope.share > 0,
        KEPT: log.replay,
        "best": config.checkpoint.keep_best is not None,
        "wandb": log.wandb != "off",
        "wandb_run.json": log.wandb != "off",
        "tensorboard": "tensorboard" in log.loggers,
    }
    always = (
        *("config.yaml", IDENTITY, FORMAT_FILE, ORIGIN, METRICS, LEDGER, RUN_LOG, SUMMARY, TRACE),
        *(LIVE_FILE, FOLDER, "model", "ray_logs"),
    )
    return [*always, *(name for name, written in optional.items() if written)]
