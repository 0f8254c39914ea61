"""The sections ``log``, where metrics go, and ``report``, what ``async_opd report`` asks for."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field, field_validator

from async_opd.config.sections.section import Name, Section
from async_opd.config.user_code import LOGGER_GROUP, names_user_code
from async_opd.core.reports import Level

LOGGERS = ("tensorboard", "mlflow", "trackio")


class MicroscopeConfig(Section):
    """Records of single tokens, for ``async_opd inspect`` (docs/microscope.md)."""

    share: float = Field(default=0.0, ge=0, le=1)
    """Share of the samples whose tokens are recorded in ``microscope/`` of the run directory; 0:
    none. ``seed`` and a sample's uid choose it, so that a resumed run records the same ones. wandb
    gets some of them as the table ``generations/samples``, every 25 steps."""
    max_mib: float = Field(default=256.0, gt=0)
    """Bytes of all records. Where they do not suffice, every second step's records are removed,
    then every second of these, so that the rest is spread over the whole run."""
    top_k: int = Field(default=8, ge=1, le=128)
    """Tokens of each side's most probable ones that are recorded at each position."""


class LogConfig(Section):
    """Destinations of metrics, besides ``metrics.jsonl``."""

    console: Literal["auto", "live", "plain", "off"] = "auto"
    """Live display, plain lines, or nothing; ``auto``: live on a terminal."""
    level: Level = "info"
    """Messages of ``run.log`` and the console from this level on: what replicas go through and
    lost samples are warnings."""
    format: Literal["text", "json"] = "text"
    """Lines of ``run.log``: text, or JSON objects with time, level, stage, replica and text."""
    wandb: Literal["auto", "online", "offline", "off"] = "auto"
    """``auto``: online if you are logged in, else offline; ``online`` is refused without a
    login."""
    project: Name = "async_opd"
    """wandb project; the project or experiment of the other loggers."""
    loggers: tuple[Name, ...] = ()
    """Further loggers, which get the same metrics: ``tensorboard`` (event files in ``tensorboard/``
    of the run directory), ``mlflow`` (MLFLOW_TRACKING_URI, else ``mlflow/`` there), ``trackio``
    (TRACKIO_DIR, else its own folder). Each needs the extra of its name: ``pip install
    'async-opd[mlflow]'``. Also ``module:function``, or an entry point of the group
    ``async_opd.loggers`` (docs/extending.md). One that fails does not end the run: ``run.log`` says
    so."""

    samples: bool = True
    """Gives loggers prompts, answers and pictures: wandb's tables ``evaluation/samples`` and
    ``generations/samples``, and alerts with the text of a failure, which may quote them. False:
    only the run directory has them, and alerts are titles (docs/security.md)."""
    pools_every_s: float = Field(default=5.0, ge=0)
    """Seconds between two reports of the pools, which come with a step: rows of steps in between
    have no metrics of pools and queues. 0: a report with each step, which costs CPU time of every
    replica where steps are quick."""
    microscope: MicroscopeConfig = MicroscopeConfig()
    thumbnails_mib: float = Field(default=64, ge=0)
    """Maximum of ``media/``: small pictures of the images that samples in ``evals/`` and
    ``microscope/`` have; those of evaluations take at most half of it. 0: none."""
    replay: bool = False
    """Keeps the batches of all steps since the oldest checkpoint that is kept, in ``replay/``, so
    that ``async_opd replay`` can compute a step again. Training waits for digests of the weights
    only. See docs/replay.md."""
    replay_gib: float = Field(default=32, gt=0)
    """Maximum of these files, of all ranks; beyond it the oldest steps are removed."""

    @field_validator("loggers")
    @classmethod
    def _each_once(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        if len(set(value)) < len(value):
            raise ValueError("a logger is named twice; name each once")
        for name in value:
            if name not in LOGGERS and not names_user_code(name, LOGGER_GROUP):
                known = ", ".join(LOGGERS)
                raise ValueError(f"{known}, module:function or an entry point, not {name!r}")
        return value

    @field_validator("console", "wandb", mode="before")
    @classmethod
    def _off_is_a_word(cls, value: Any) -> Any:
        return "off" if value is False else value  # YAML reads a bare off as false


class ReportConfig(Section):
    """Settings of ``async_opd report``; a run does not read them. See docs/report.md."""

    gpu_hour_price: float | None = Field(default=None, ge=0)
    """Price of one GPU for one hour, in any currency. The report then says what a million trained
    tokens cost. By default it says the GPU hours only."""
