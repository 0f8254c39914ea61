"""A run directory, a checkpoint or a kept step that is given to a command: what of it is used.

    RUN_DIR, checkpoints/step_N ──given_run──┐
    the record of a kept step ──given_config─┴─► a config that names no code, models that are here

Its author may be somebody else, whom the user trusts to train, not to run code. ``run`` reads a
config of the user's own, and so does not start here.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from async_opd.checkpoint.resume import changed_keys
from async_opd.checkpoint.store import MANIFEST, in_its_run, load
from async_opd.checks.models import ModelChecks
from async_opd.config.load import load_config
from async_opd.config.overrides import TRUST
from async_opd.config.registry import TRANSPORTS
from async_opd.config.run_config import RunConfig
from async_opd.config.sections.log import LOGGERS
from async_opd.config.sections.loss import score_kind
from async_opd.core.errors import CheckpointError, ConfigError, Findings, Problem
from async_opd.files.absent import refuse_absent
from async_opd.files.foreign import ForeignPath, Place, foreign
from async_opd.files.run_format import refuse_other_formats
from async_opd.grading.graders import is_function
from async_opd.models.families import refused
from async_opd.models.hub import named_models, naming_faults

TEMPLATE = ".jinja"
SAME_CLUSTER = (None, "local")


@dataclass(frozen=True)
class GivenRun:
    """``checkpoint`` is the folder of the verified one that was given; None for the run's end."""

    run_dir: ForeignPath
    config: RunConfig
    checkpoint: Path | None


def given_run(place: Place, trusted: bool) -> GivenRun:
    """A run directory or one of its checkpoints. ConfigError for what may not be used; OSError."""
    refuse_absent(place, "RUN_DIR|CHECKPOINT")
    is_checkpoint = (foreign(place) / MANIFEST).is_file()
    run_dir = ForeignPath(in_its_run(place).root) if is_checkpoint else foreign(place)
    if not (run_dir / "config.yaml").exists():
        message = f"{place} is neither a run directory nor one of its checkpoints"
        raise _refused(message, "name a checkpoint by its place in the run: checkpoints/step_N")
    if not is_checkpoint:
        return GivenRun(run_dir, given_config(run_dir, trusted), None)
    refuse_other_formats(run_dir)
    try:
        found = load(place)
        record = dict(json.loads(found.config)["config"])
    except CheckpointError as error:
        raise _refused(error.cause, error.remedy or "name another checkpoint") from error
    except (ValueError, LookupError, TypeError, RecursionError) as error:
        raise _refused(f"the config.json of {place} is damaged", "name another one") from error
    return GivenRun(run_dir, given_config(run_dir, trusted, record), found.folder)


def given_config(
    run_dir: Place, trusted: bool, record: Mapping[str, Any] | None = None, replayed: bool = False
) -> RunConfig:
    """The config of a run directory, or of a ``record`` in it, by which the student is loaded.

    ``trusted``: it may name code. ``replayed``: a step is computed again, for which the trainer may
    load the heads of teachers, too. ConfigError with all problems: it names code, or a model that
    is not a directory here or leads to another one, or the record is of another run.
    """
    place = foreign(run_dir)
    refuse_other_formats(place)
    where = str(place / "config.yaml")
    config = load_config(place / "config.yaml", recorded=True)
    code, problems = dict(_named_code(config, replayed)), list[Problem]()
    if record is not None:
        of_run, config = config, load_config(record, (), place.root, recorded=True)
        # the record has the cluster that the environment named then
        config = config.model_copy(update={"cluster": of_run.cluster})
        code |= _named_code(config, replayed)
        trees = (one.model_dump(mode="json", by_alias=True) for one in (config, of_run))
        for key, was, now in changed_keys(*trees):
            message = f"is {now!r}, but {was!r} in the record of the checkpoint or step"
            problems.append(Problem(where, key, message, "restore the run directory as it was"))
    for key, value in code.items() if not trusted else ():
        message = f"found {value!r}, by which the author of the directory can run code as you"
        remedy = f"read that code, then add {TRUST}: it permits all that the directory names"
        problems.append(Problem(where, key, message, remedy))
    for key, file in _templates(config) if not trusted else ():
        message = f"found {file!r}, which is read although its name is not that of a template"
        remedy = f"call it {TEMPLATE}, or look at it and add {TRUST}"
        problems.append(Problem(where, key, message, remedy))
    if record is not None and not problems:
        problems += _unusable_models(config, where, replayed)
    if problems:
        raise ConfigError(problems)
    # a replay writes logs, and not where the record says
    own = {"run_dir": os.path.abspath(str(place))} if replayed else {}
    return config.model_copy(update=own)


def _templates(config: RunConfig) -> Iterator[tuple[str, str]]:
    """Keys and files of templates that may be any file of the user's."""
    teachers = {f"teachers.{name}": teacher for name, teacher in config.teachers.items()}
    for key, section in {"student": config.student, **teachers}.items():
        file = section.chat_template_file
        if file is not None and not file.endswith(TEMPLATE):
            yield f"{key}.chat_template_file", file


def _named_code(config: RunConfig, replayed: bool) -> Iterator[tuple[str, object]]:
    """The keys by which a config runs code that is neither ours nor a library's, and their values.

    A cluster's processes send pickles to those of a run. One that runs here (``auto``) is joined
    only by a run that is ``replayed``.
    """
    for named in named_models(config):
        if named.trusted:
            yield f"{named.key}.trust_remote_code", True
    if config.loss.kind == "user":
        yield "loss.function", config.loss.function
    reward = "exact" if config.reward is None else config.reward.grader
    for key, grader in (("eval.grader", config.eval.grader), ("reward.grader", reward)):
        if is_function(grader):
            yield key, grader
    if (environment := config.environment) is not None and environment.code:
        yield "environment", environment.code
    first = () if config.cold_start is None else config.cold_start.data
    parts = {"data.train": config.data.train, "data.eval": config.data.eval}
    for part, sources in (*parts.items(), ("cold_start.data", first)):
        of_user = (source.label for source in sources if source.kind == "user")
        yield from ((f"{part}.function", name) for name in of_user)
    if others := [name for name in config.log.loggers if name not in LOGGERS]:
        yield "log.loggers", others
    if config.sync.backend not in ("auto", *TRANSPORTS):
        yield "sync.backend", config.sync.backend
    of_here = (*SAME_CLUSTER, os.environ.get("RAY_ADDRESS"))
    if config.cluster.address not in (of_here if replayed else (*of_here, "auto")):
        yield "cluster.address", config.cluster.address


def _unusable_models(config: RunConfig, where: str, replayed: bool) -> Iterator[Problem]:
    """Faults of the models that the trainer would load: none is asked for on a hub."""
    if not replayed or score_kind(config.loss) != "hidden":
        config = config.model_copy(update={"teachers": {}})
    yield from naming_faults(config, where)
    for named in named_models(config):
        if named.is_hub_id:
            message = f"{named.model} is not a directory, and is not downloaded for a given run"
            remedy = "download it yourself, and write its directory into the run's config.yaml"
            yield Problem(where, f"{named.key}.model", message, remedy)
    found = Findings(where)
    models = ModelChecks(config, found)
    models.models()
    student = models.files.get("student.model")
    vision = student is not None and student.config.get("vision_config") is not None
    if student and (reason := refused(student.config, None, trained=True) if vision else ""):
        remedy = "restore the run directory as it was: no run trains such a student"
        found.add("student.model", f"{student.path} {reason}", remedy)
    yield from found.problems


def _refused(message: str, remedy: str) -> ConfigError:
    return ConfigError.of("RUN_DIR|CHECKPOINT", message, remedy)
