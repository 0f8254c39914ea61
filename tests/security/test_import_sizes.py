"""A stranger's script or config: ``import`` bounds the memory and the time that it may take."""

from __future__ import annotations

import shlex
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from async_opd.core.errors import ConfigError
from async_opd.tools.importing.command import imported
from async_opd.tools.importing.draft import FILE_BYTES
from async_opd.tools.importing.shell import split
from tests.fuzz.command import command

pytestmark = pytest.mark.slow

LONG = "a" * 60_000
MANY, MANY_NAMES = range(100), range(20_000)
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


NESTED = [
    *(("GKDTrainer(model=", ")"), ("GKDTrainer(peft_config=", ")"), ("GKDTrainer(**", ")")),
    *(("load_dataset(split=", ")"), ("setattr(", ",x,1)")),
]
LARGE = {
    "sums.sh": "run x=" + "$((1))" * 170_000,
    "word.sh": "run " + "a" * 1_040_000,
    "array.sh": "A+=(b)\n" * 149_000,
    "number.yaml": "k: " + "1" * 100_000,
    "number.sh": "run --teacher_model_name_or_path " + "1" * 100_000,
    "dots.yaml": "k: ${" + "." * 1_000_000,
    "relative.yaml": "? " + "a." * 250_000 + "a\n: " + "${.x}" * 90_000,
    "tables.toml": "".join(f'[[orchestrator.env]]\nid="e{n}"\n' for n in range(12_000)),
    "sources.toml": "".join(
        f'[[orchestrator.train.source]]\nname="e{n}"\nalgo.type="opd"\n' for n in range(2_000)
    )
    + '[[inference]]\ntag="t"\n' * 35_000,
    "conflicts.sh": "".join(f"run actor_rollout_ref.a={n}\n" for n in range(33_000)),
    "blocks.sh": "if x; then echo done; fi; $(\n" * 35_000 + "run x.y=$(a",
    "appended.sh": "A+=b\n" * 200_000,
    "models.py": "a0='m'\n"
    + "".join(f"a{n + 1}=a{n}\na{n + 1}=a{n}\n" for n in range(60))
    + "GKDTrainer(a60, a60)",
    **{
        f"nested_{number}.py": begin * 100 + f"[{'1,' * 150_000}]" + end * 100
        for number, (begin, end) in enumerate(NESTED)
    },
    "conditions.sh": "if x; then\n" + "a=1\n" * 100_000 + "fi\nrun x.y=$a",
    "names.py": "a0=1\n"
    + "".join(f"a{n + 1}=a{n}\n" for n in MANY_NAMES)
    + f"GKDConfig({', '.join(f'x{n}=a{len(MANY_NAMES)}' for n in MANY_NAMES)})",
}
"""Files of an allowed size of which a part is looked at once for every other part of its kind."""


@pytest.mark.parametrize("name", LARGE)
def test_no_file_of_an_allowed_size_takes_quadratic_time(tmp_path: Path, name: str) -> None:
    """Each would take minutes, which ``command`` does not wait for."""
    (tmp_path / name).write_text(LARGE[name])
    assert (tmp_path / name).stat().st_size <= FILE_BYTES
    assert command("import", str(tmp_path / name)).code in (0, 2)


@pytest.mark.parametrize(
    "line", ["{}=1", "[{}]", 'x."{}"=1', "y = {{{} = 1}}"], ids=["key", "table", "quoted", "inline"]
)
def test_a_key_of_toml_has_few_parts(tmp_path: Path, line: str) -> None:
    """tomllib takes memory by the square of their number: a tebibyte for a file of this size."""
    many = ('"."' if '"' in line else " . ").join("a" * 70)
    (tmp_path / "rl.toml").write_text(line.format(many))
    with pytest.raises(ConfigError, match="a key has more than 64 parts"):
        imported(tmp_path / "rl.toml")


@given(st.text(st.sampled_from("ab \t\n'\"\\é")))
def test_words_are_those_of_a_shell(text: str) -> None:
    try:
        expected = shlex.split(text)
    except ValueError:
        with pytest.raises(ValueError, match="no part of a word"):
            split(text)
    else:
        assert split(text) == expected
