"""The date that chat templates write into prompts: one for a whole run, resumed parts included.

no data.template_date ──today, or that of the run directory's config.yaml──► data.template_date
"""

from __future__ import annotations

from datetime import date
from pathlib import Path

from async_opd.config.run_config import RunConfig
from async_opd.config.yaml_text import YamlError, load_yaml
from async_opd.files.foreign import ForeignPath
from async_opd.models.chat_template import DATED
from async_opd.models.tokenizer import chat_of


def with_template_date(config: RunConfig, resume: bool = False) -> RunConfig:
    """The config with the date of its prompts, if a chat template reads one and none is set.

    A resumed run keeps that of its run directory: on another day other rows could be too long, and
    the order of all rows follows from those that are left. ``config.yaml`` without a date, as older
    versions wrote it, gives none. Models are local directories.
    """
    if config.data.template_date is not None or not _reads_date(config):
        return config
    today = date.today().isoformat()
    file = ForeignPath(Path(config.run_dir or "")) / "config.yaml"
    found = _recorded(file, today) if resume else today
    data = config.data.model_copy(update={"template_date": found})
    return config.model_copy(update={"data": data})


def _recorded(file: ForeignPath, default: str) -> str | None:
    """The date in a run's config; ``default`` if the file cannot be read.

    The date is then compared with that of the run's checkpoint, as every key is.
    """
    try:
        value = load_yaml(file.read().decode())["data"].get("template_date")
    except (OSError, ValueError, YamlError, LookupError, TypeError, AttributeError):
        return default
    return value if isinstance(value, str) else None


def _reads_date(config: RunConfig) -> bool:
    """Whether the student's or a teacher's template calls ``strftime_now``.

    A template that cannot be read calls nothing: the checks of a run report it.
    """
    own, teachers = config.student.model, config.teachers.items()
    models = [own, *(config.template_model(n) if t.own_template else own for n, t in teachers)]
    for section, model in zip((config.student, *config.teachers.values()), models, strict=True):
        try:
            if model is not None and DATED in (chat_of(section, Path(model)).text or ""):
                return True
        except (OSError, ValueError, LookupError, TypeError):
            continue
    return False
