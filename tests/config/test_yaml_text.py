"""YAML: numbers, duplicate keys, lines of errors, and what is written reads back equal."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from async_opd.config.yaml_text import YamlError, dump_yaml, load_yaml

SCALARS = st.none() | st.booleans() | st.integers() | st.text() | st.floats(allow_nan=False)
TREES = st.recursive(
    SCALARS, lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner), max_leaves=10
)


def faults(text: str) -> list[tuple[int, str, str]]:
    with pytest.raises(YamlError) as caught:
        load_yaml(text)
    return caught.value.faults


@pytest.mark.parametrize("text", ["1e-5", "1E5", "-2e3", ".5e1", "1.5e-5"])
def test_an_exponent_without_a_dot_or_sign_is_a_number(text: str) -> None:
    assert load_yaml(text) == float(text)


def test_a_string_that_looks_like_a_number_stays_a_string() -> None:
    assert load_yaml(dump_yaml({"name": "1e5"})) == {"name": "1e5"}


def test_all_duplicate_keys_are_reported_with_line_and_key() -> None:
    assert faults("a:\n  b: 1\n  b: 2\nc: 1\nc: 2\n") == [
        (3, "a.b", "the key is there twice, first on line 2"),
        (5, "c", "the key is there twice, first on line 4"),
    ]


def test_a_merge_key_may_be_overridden() -> None:
    assert load_yaml("x: &x {a: 1, b: 2}\ny: {<<: *x, a: 3}")["y"] == {"a": 3, "b": 2}


def test_a_value_that_contains_itself_is_refused() -> None:
    assert "contains itself" in faults("a: &a [*a]")[0][2]


@pytest.mark.parametrize(
    "text", ["!!timestamp 5", "!!int ''", "!!bool x", "{[1]: 2}", "[x", "a: b: c", "=", "\x01"]
)
def test_what_is_no_yaml_has_a_line(text: str) -> None:
    assert faults(f"\n{text}")[0][0] == 2


@given(TREES)
def test_what_is_written_reads_back_equal(tree: Any) -> None:
    assert load_yaml(dump_yaml(tree)) == tree


def test_keys_are_written_in_their_order() -> None:
    assert dump_yaml({"b": 1, "a": 2}) == "b: 1\na: 2\n"


@given(st.text())
def test_no_text_ends_in_another_error(text: str) -> None:
    with contextlib.suppress(YamlError):
        load_yaml(text)


def test_aliases_of_aliases_are_refused_by_what_they_would_be_written_out() -> None:
    bomb = "a0: &a0 [x]\n" + "".join(
        f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 9)}]\n" for i in range(1, 40)
    )
    assert "too large: more than 100,000 values" in faults(bomb)[0][2]


def test_merges_of_merges_are_refused_by_what_they_would_be_written_out() -> None:
    bomb = "a0: &a0 {x: 1}\n" + "".join(
        f"a{i}: &a{i} {{<<: [{', '.join([f'*a{i - 1}'] * 9)}]}}\n" for i in range(1, 30)
    )
    assert "too large" in faults(bomb)[0][2]


@pytest.mark.parametrize("depth", [65, 300, 20_000])
def test_a_document_that_is_nested_too_deeply_is_refused(depth: int) -> None:
    assert "nested too deeply" in faults("[" * depth + "]" * depth)[0][2]
