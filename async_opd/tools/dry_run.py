"""``async_opd run --dry-run``: where a run would begin and what it would write, or all problems."""

from __future__ import annotations

from pathlib import Path

from async_opd.accounting.lineage import is_on_the_way
from async_opd.checkpoint.earlier_run import (
    is_completed,
    newest_mirrored,
    outputs,
    refuse_another,
    refuse_begun,
    refuse_begun_in_other_format,
    refuse_mirrored,
)
from async_opd.checkpoint.resume import identity
from async_opd.checkpoint.store import FOLDER, Checkpoints
from async_opd.config.device_defaults import resolved
from async_opd.config.run_config import RunConfig
from async_opd.config.secrets import Redactor
from async_opd.core.printable import escaped, on_one_line
from async_opd.data.hub import with_cached_data
from async_opd.data.mixture import with_steps
from async_opd.data.template_date import with_template_date
from async_opd.models.hub import named_models, with_cached
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
    refuse_begun_in_other_format(run_dir)
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
