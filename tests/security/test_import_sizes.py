"""A stranger's script or config: ``import`` bounds the memory that its few lines may become."""

from __future__ import annotations

from pathlib import Path

import pytest

from async_opd.core.errors import ConfigError
from async_opd.tools.importing.command import imported

LONG = "a" * 60_000
MANY = range(100)
ALIASES = ", ".join(["*a"] * 60)
PARTS = {
    "values.sh": [f"A={LONG}", *(f"X{n}=$A" for n in MANY)],
    "one_word.sh": [f"A={LONG}", f"run x={'$A' * 100}"],
    "default.sh": [f"A={LONG}", *(f"run x=${{B:-$A}}{n}" for n in MANY)],
    "array.sh": [f"A=({LONG} b)", *(f'run {n} "${{A[@]}}"' for n in MANY)],
    "overrides.sh": [f"run a.b='[&a {'b' * 1000}, {ALIASES}]'" for _ in MANY],
    "values.yaml": [f"k: {LONG}", *(f"x{n}: y${{k}}" for n in MANY)],
    "whole.yaml": [f"k: [{LONG}]", *(f"x{n}: ${{k}}" for n in MANY)],
    "keys.yaml": [f"{'k' * 900}:", *(f"  x{n}: 1" for n in range(6000))],
    "aliases.yaml": [f"a: &a {'b' * 1000}", *(f"x{n}: [{ALIASES}]" for n in MANY)],
    "keys.toml": [f"[{LONG}]", *(f"x{n} = 1" for n in MANY)],
    "values.py": [f"a = '{LONG}'", f"GKDConfig({', '.join(f'x{n}=a' for n in MANY)})"],
    "sections.py": [f"a = dict(b='{LONG}')", f"GKDConfig({', '.join(f'x{n}=a' for n in MANY)})"],
}


@pytest.mark.parametrize("name", PARTS)
def test_all_that_a_file_becomes_is_bounded(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_text("\n".join(PARTS[name]))
    with pytest.raises(ConfigError, match="in place it has more than 4,194,304 characters"):
        imported(tmp_path / name, "trl")


@pytest.mark.parametrize("name", ["large.sh", "large.yaml", "large.toml", "large.py"])
def test_a_file_of_more_than_a_mebibyte_is_refused(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_text("#" * ((1 << 20) + 1))
    with pytest.raises(ConfigError, match="has more than 1048576 bytes"):
        imported(tmp_path / name, "trl")
