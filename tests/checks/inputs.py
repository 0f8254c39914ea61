"""Inputs with something wrong in them, and what preflight finds."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

from async_opd.checks.preflight import preflight
from async_opd.config.load import load_config
from async_opd.config.run_config import RunConfig
from async_opd.core.errors import Problem

EXAMPLE = Path(__file__).parents[2] / "examples" / "quickstart.yaml"
MODELS = EXAMPLE.parent / "quickstart" / "models"
FEW = [f"data.{part}=[{Path(__file__).with_name('few.jsonl')}]" for part in ("train", "eval")]
"""Instead of the quickstart's 6,512 rows, each of which every check reads and encodes."""
GOOD = [{"prompt": "sort 1=", "data_source": "sort"}, {"prompt": "x", "data_source": "reverse"}]


def config(*overrides: str) -> RunConfig:
    return load_config(EXAMPLE, [*FEW, *overrides])


def found(*overrides: str, gpus: int = 0, load: bool = False) -> list[Problem]:
    return preflight(config(*overrides), "c.yaml", gpus, load).problems


def one(*overrides: str, gpus: int = 0, load: bool = False) -> Problem:
    (problem,) = found(*overrides, gpus=gpus, load=load)
    return problem


def rows(tmp_path: Path, *entries: Any) -> str:
    file = tmp_path / "rows.jsonl"
    lines = [entry if isinstance(entry, str) else json.dumps(entry) for entry in entries]
    file.write_text("\n".join(lines))
    return f"data.train=[{file}]"


def pictured_row() -> dict[str, Any]:
    """A row with an embedded image."""
    from base64 import b64encode

    from tests.data.pictures import RED

    image = f"data:image/png;base64,{b64encode(RED).decode()}"
    return {"prompt": "<image>sort 2=", "data_source": "sort", "images": [image]}


def model(tmp_path: Path, name: str, **settings: Any) -> Path:
    """A copy of one of the quickstart's models, with other settings in its config.json."""
    path = tmp_path / name
    shutil.copytree(MODELS / name, path)
    change(path / "config.json", settings)
    return path


def change(file: Path, settings: dict[str, Any]) -> None:
    """Other settings in a JSON file."""
    file.write_text(json.dumps(json.loads(file.read_text()) | settings))


def broken_student(tmp_path: Path, name: str, text: str) -> str:
    path = model(tmp_path, "student")
    (path / name).write_text(text)
    return f"student.model={path}"
