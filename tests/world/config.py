"""The smallest config of a run."""

from __future__ import annotations

from typing import Any

from async_opd.config.run_config import RunConfig


def run_config(**sections: Any) -> RunConfig:
    """With a student, a teacher ``t`` and a file of prompts, unless a section says otherwise."""
    smallest = {
        "student": {"model": "s"},
        "teachers": {"t": {"model": "t"}},
        "data": {"train": "rows.jsonl"},
    }
    return RunConfig.model_validate(smallest | sections)


def changed(config: RunConfig, **sections: dict[str, Any]) -> RunConfig:
    """A config with other values of some keys, by section."""
    update = {
        name: getattr(config, name).model_copy(update=values) for name, values in sections.items()
    }
    return config.model_copy(update=update)
