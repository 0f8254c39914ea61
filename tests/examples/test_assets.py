"""The committed models and data are the measured ones; ``make.py --verify`` measures them again."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.mark.parametrize("name", ["quickstart", "vision", "episodes"])
def test_the_committed_files_are_the_measured_ones_below_five_megabytes(name: str) -> None:
    folder = EXAMPLES / name
    made = json.loads((folder / "models" / "MANIFEST.json").read_text(encoding="utf-8"))
    contents = {file: (folder / file).read_bytes() for file in made["sha256"]}
    found = {file: hashlib.sha256(content).hexdigest() for file, content in contents.items()}
    assert found == made["sha256"]
    for file in ("model.safetensors", "config.json"):
        assert any(name.endswith(f"student/{file}") for name in found)
    assert sum(map(len, contents.values())) < 5_000_000
