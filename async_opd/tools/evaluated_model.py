"""The model that a tool evaluates, as the student of a config that starts nothing else."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from async_opd.config.run_config import RunConfig
from async_opd.config.sections.rollout import StudentConfig
from async_opd.config.sections.teachers import EndpointTeacher
from async_opd.core.errors import ConfigError, StageError
from async_opd.files.absent import refuse_absent
from async_opd.files.foreign import foreign


def evaluation_config(config: RunConfig, model: str | None, teacher: str | None) -> RunConfig:
    """The config with the model as its student, which only ``eval.replicas`` run.

    ConfigError for a model and a teacher, for an unknown or external teacher, and for no model.
    """
    section: Any = config.rollout
    if teacher is not None:
        found = config.teachers.get(teacher)
        if model is not None:
            raise ConfigError.of("--teacher", f"found {teacher} beside {model}", "name one of both")
        if found is None:
            message, known = f"the config has no teacher {teacher}", ", ".join(config.teachers)
            raise ConfigError.of("--teacher", message, f"one of {known}")
        if isinstance(found, EndpointTeacher):
            remedy = "a run measures it before training (eval.teachers)"
            raise ConfigError.of("--teacher", f"{teacher} is a server that others run", remedy)
        section = found
        model = config.teacher_model(teacher)
    elif model is not None:
        model = _model_in(model)
    student = config.student if model is None else _student_of(config, section, model)
    engines = {"engine": section.engine, "tensor_parallel": section.tensor_parallel}
    rollout = config.rollout.model_copy(update={**engines, "placement": "dedicated", "with_": None})
    evaluation = config.eval.model_copy(
        update={"replicas": section.min_replicas, "teachers": False}
    )
    train = config.train.model_copy(update={"lora": None})
    parts = {"student": student, "rollout": rollout, "eval": evaluation, "train": train}
    return config.model_copy(update=parts)


def _student_of(config: RunConfig, section: Any, model: str) -> StudentConfig:
    """The student's section with a model; a teacher's has the trust that the teacher has."""
    own = ("trust_remote_code", "revision", "processor_kwargs")
    its = {name: getattr(section, name) for name in own if hasattr(section, name)}
    return config.student.model_copy(update={**its, "model": model})


def _model_in(target: str) -> str:
    """The model's directory: the target, or ``model/`` of a run directory. ConfigError.

    It is absolute: a relative one of two parts has the form of a hub id.
    """
    from async_opd.files.run_format import FORMAT_FILE, refuse_other_formats

    refuse_absent(Path(target), "MODEL|RUN_DIR")
    folder = foreign(Path(target).absolute())
    if (folder / FORMAT_FILE).exists():
        refuse_other_formats(folder)
        if not (folder / "model").exists():
            message = f"{folder} has no model/ yet: the run has not ended"
            raise ConfigError.of("MODEL", message, "end the run, or name a model's directory")
        return str((folder / "model").as_path())
    if not (folder / "config.json").exists():
        message = f"{folder} is neither a model's directory nor a run directory"
        remedy = "check the path; a checkpoint is named checkpoints/step_N"
        raise ConfigError.of("MODEL", message, remedy)
    return str(folder.as_path())


def exported(checkpoint: Path, target: Path, trusted: bool) -> str:
    """Writes the checkpoint's model to ``target``, by the config of its run. ConfigError."""
    from async_opd.files.safe_open import private_files
    from async_opd.tools.given_run import given_run
    from trainer.saving.export import export_checkpoint

    run = given_run(checkpoint, trusted)
    try:
        with private_files():
            export_checkpoint(run.config, run.checkpoint or checkpoint, target)
    except StageError as error:
        remedy = error.remedy or "name another checkpoint"
        raise ConfigError.of("MODEL", error.cause, remedy) from error
    return str(target)
