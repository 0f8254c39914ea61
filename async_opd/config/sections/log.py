"""The section ``log``: where metrics go."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import field_validator

from async_opd.config.sections.section import Section
from async_opd.core.level import Level


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
    """``auto``: online if you are logged in, else offline."""
    project: str = "async_opd"
    """wandb project."""

    @field_validator("console", "wandb", mode="before")
    @classmethod
    def _off_is_a_word(cls, value: Any) -> Any:
        return "off" if value is False else value  # YAML reads a bare off as false
