"""One message of ``run.log`` as text or as a JSON object, with its level, stage and replica.

2026-11-22T12:05:28 WARNING student/0 is ejected: its engine's process has ended
{"time": "2026-11-22T12:05:28", "level": "warning", "stage": "rollout", "replica": …
"""

from __future__ import annotations

import json
import re

from async_opd.core.level import Level

LEVELS: tuple[Level, ...] = ("info", "warning", "error")
_ABOUT = re.compile(
    r"(?P<stage>student|trainer|teacher [^\s/:]+|rollouter|scorer|queue)(/\d+)?[ :]"
)
_STAGES = {"student": "rollout", "rollouter": "rollout", "trainer": "train"}


def is_shown(level: Level, least: Level) -> bool:
    """Whether a message of this level is at least of the level ``least``."""
    return LEVELS.index(level) >= LEVELS.index(least)


def text_line(moment: str, level: Level, text: str) -> str:
    """The line, whose level is named unless it is ``info``."""
    return f"{moment} {text}" if level == "info" else f"{moment} {level.upper()} {text}"


def json_line(moment: str, level: Level, text: str) -> str:
    """The object on one line. Stage and replica are those that the text begins with, or ''."""
    about = _ABOUT.match(text)
    stage = about["stage"] if about else ""
    entry = {
        "time": moment,
        "level": level,
        "stage": _STAGES.get(stage, stage.replace("teacher ", "teacher/")),
        "replica": stage + about[2] if about and about[2] else "",
        "text": text,
    }
    return json.dumps(entry)
