"""The panels of the dashboard: their metrics, what is normal, and what to do otherwise."""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cache
from importlib.resources import files

import yaml
from pydantic import ConfigDict, TypeAdapter

STEP = "step"
EVALUATION_STEP = "evaluation/step"
VERSION = "sync/version"


@dataclass(frozen=True)
class Panel:
    """One chart: ``keys`` are metrics, or patterns of the catalogue, over the axis ``x``."""

    __pydantic_config__ = ConfigDict(extra="forbid")

    section: str
    title: str
    keys: tuple[str, ...]
    shows: str
    normal: str
    otherwise: str
    x: str = STEP

    @property
    def regex(self) -> str:
        """A regular expression of all its keys; '' if none is a pattern."""
        if not any("<" in key for key in self.keys):
            return ""
        parts = (".+".join(map(re.escape, re.split(r"<\w+>", key))) for key in self.keys)
        return f"^({'|'.join(parts)})$"


@cache
def panels() -> tuple[Panel, ...]:
    """All panels, section by section. ValidationError for an entry that is none."""
    text = files(__package__).joinpath("panels.yaml").read_text(encoding="utf-8")
    entries = [
        {"section": section, "title": title, **entry}
        for section, own in yaml.safe_load(text).items()
        for title, entry in own.items()
    ]
    return tuple(TypeAdapter(list[Panel]).validate_python(entries))
