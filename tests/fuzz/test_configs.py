"""Config files: whatever is in them, the command works or names the problems. And it ends."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from async_opd.config.keys import keys_below
from tests.fuzz.command import checked, command, good, written
from tests.fuzz.conftest import examples

pytestmark = pytest.mark.slow

HUGE = st.sampled_from([10**18, -(10**18), 2**63, 10**400, -1, 0, 1e308, 5e-324, -0.0])
SCALARS = (
    st.none()
    | st.booleans()
    | st.integers()
    | HUGE
    | st.floats()
    | st.text(max_size=20)
    | st.sampled_from(["", "\x00", "a" * 5000, "~", "off", "../../..", "\u2028", "1e-5", "<<"])
)
TREES = st.recursive(
    SCALARS,
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(st.text(max_size=8) | st.integers() | st.none(), inner, max_size=4)
    ),
    max_leaves=8,
)


def paths(prefix: str = "") -> list[str]:
    """Every dotted key of the config, sections included."""
    found = []
    for name in keys_below(prefix) or ["sort"] * (prefix == "teachers"):
        key = f"{prefix}.{name}".lstrip(".")
        found += [key, *paths(key)]
    return found


KEYS = st.sampled_from(sorted(paths()))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("configs")


@pytest.fixture(scope="module")
def plain(folder: Path) -> dict[str, Any]:
    return good(folder)


def put(config: dict[str, Any], key: str, value: Any) -> dict[str, Any]:
    """A copy with one key set, whatever it lies in."""
    made = copy.deepcopy(config)
    node: Any = made
    *outer, last = key.split(".")
    for name in outer:
        if not isinstance(node.get(name), dict):
            node[name] = {}
        node = node[name]
    node[last] = value
    return made


def test_the_config_that_is_mutated_here_is_good(folder: Path, plain: dict[str, Any]) -> None:
    assert checked(written(folder, plain)).code == 0


@examples(60)
@given(content=st.binary(max_size=200))
def test_bytes(folder: Path, content: bytes) -> None:
    file = folder / "bytes.yaml"
    file.write_bytes(content)
    assert checked(file).code == 2


@examples(60)
@given(
    text=st.text(alphabet=st.sampled_from("ab:-[]{}&*!<>|'\"#%@`?, \n\t\u2028é😀0.1e"), max_size=60)
)
def test_text_of_the_characters_that_yaml_knows(folder: Path, text: str) -> None:
    file = folder / "text.yaml"
    file.write_text(text)
    assert checked(file).code == 2


@examples(60)
@given(tree=TREES)
def test_any_tree(folder: Path, tree: Any) -> None:
    assert checked(written(folder, tree)).code == 2


@examples(120)
@given(changes=st.lists(st.tuples(KEYS, TREES), min_size=1, max_size=3))
def test_a_good_config_with_other_values(
    folder: Path, plain: dict[str, Any], changes: list[tuple[str, Any]]
) -> None:
    config = plain
    for key, value in changes:
        config = put(config, key, value)
    checked(written(folder, config))


@examples(60)
@given(cut=st.tuples(st.integers(0, 600), st.integers(0, 40)), new=st.text(max_size=10))
def test_a_good_config_with_other_characters(
    folder: Path, plain: dict[str, Any], cut: tuple[int, int], new: str
) -> None:
    text = yaml.safe_dump(plain)
    start, length = cut
    file = folder / "cut.yaml"
    mutated = text[:start] + new + text[start + length :]
    file.write_text(mutated, encoding="utf-8", errors="surrogatepass")
    checked(file)


@examples(80)
@given(
    overrides=st.lists(
        st.builds("{}={}".format, KEYS, st.text(max_size=12) | SCALARS) | st.text(max_size=12),
        max_size=3,
    )
)
def test_overrides(folder: Path, plain: dict[str, Any], overrides: list[str]) -> None:
    said = command("check", str(written(folder, plain)), *overrides)
    assert said.code in (0, 2)
    assert said.code == 0 or said.err


@examples(15)
@given(
    width=st.integers(2, 40),
    depth=st.integers(5, 60),
    key=st.sampled_from(["rollout.engine.extra", "data.train", "teachers", "x", "plan"]),
    merge=st.booleans(),
)
def test_aliases_of_aliases(
    folder: Path, plain: dict[str, Any], width: int, depth: int, key: str, merge: bool
) -> None:
    inner = "a0: &a0 {x: 1}\n" if merge else "a0: &a0 [x]\n"
    for level in range(1, depth):
        many = ", ".join([f"*a{level - 1}"] * width)
        inner += f"a{level}: &a{level} " + ("{<<: [%s]}\n" if merge else "[%s]\n") % many
    file = folder / "bomb.yaml"
    nested = "".join(f"{'  ' * at}{name}:\n" for at, name in enumerate(key.split(".")))
    bomb = "".join(f"{'  ' * (key.count('.') + 1)}{line}\n" for line in inner.splitlines())
    file.write_text(
        yaml.safe_dump({k: v for k, v in plain.items() if k not in key}) + nested + bomb
    )
    assert checked(file).code == 2


def test_a_file_that_does_not_end() -> None:
    assert "more than 1 MiB" in checked(Path("/dev/zero")).err


@pytest.mark.parametrize("path", ["", ".", "/nowhere/config.yaml", "\x00", "a" * 5000])
def test_a_file_that_is_none(path: str) -> None:
    assert command("check", path).code == 2
