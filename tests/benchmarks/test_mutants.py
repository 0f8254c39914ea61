"""Mutants are drawn from code only, found where it was moved, and change all that runs it."""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
from pathlib import Path
from textwrap import dedent
from types import ModuleType

import pytest
import yaml

from benchmarks import mutants
from benchmarks.mutants import Mutant, NotReplaced, changed_code, live, located, replace

ROOT = Path(__file__).parents[2]
CODE = """
from contextlib import contextmanager
from pydantic import BaseModel, model_validator

class Config(BaseModel):
    rows: int = 1

    @model_validator(mode="after")
    def _has_rows(self):
        if self.rows < 1:
            raise ValueError("no rows")
        return self

class Base:
    def size(self):
        return 1

class Few(Base):
    def __init__(self, rows):
        self.rows = rows

    def size(self):
        return super().size() + len(self.rows)

    def __repr__(self):
        return str(1 + 1)

@contextmanager
def opened(strict=True):
    yield strict is True
"""


def tree(root: Path, **files: str) -> Path:
    """A source tree with files by their names without dots and slashes."""
    for name, text in files.items():
        path = root / f"{name.replace('__', '/')}.py"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(dedent(text))
    return root.resolve()


def changes(root: Path, source: str = "trainer") -> set[tuple[str, str]]:
    """All expressions of a tree that can change, each with its change."""
    found = mutants.drawn([root], 1000, [source])
    return {(one.expression, one.change) for one in found}


def body(code: str) -> str:
    return "def one(a, b, self):\n" + "".join(f"    {line}\n" for line in code.splitlines())


@pytest.mark.parametrize(
    ("code", "expression", "change"),
    [
        ("b = a < 1", "a < 1", "a <= 1"),
        ("b = a in b", "a in b", "a not in b"),
        ("b = a and b", "a and b", "a or b"),
        ("b = not a", "not a", "a"),
        ("b = a - b", "a - b", "a + b"),
        ("a *= b", "a *= b", "a /= b"),
        ("b = a[1:]", "a[1:]", "a[2:]"),
        ("b = a(key=True)", "a(key=True)", "a(key=False)"),
        ("a(b)", "a(b)", "pass"),
        ("self.a = b", "self.a = b", "pass"),
        ("return a", "return a", "return None"),
        ("if a:\n    b = 1\nelse:\n    b = 2", "a", "not a"),
    ],
)
def test_a_statement_has_its_changes(
    code: str, expression: str, change: str, tmp_path: Path
) -> None:
    assert (expression, change) in changes(tree(tmp_path, trainer__one=body(code)))


@pytest.mark.parametrize(
    "code",
    [
        '"""a < 1"""',
        'raise ValueError(f"{a + 1}", b * 2)',
        'b = f"{a + 1}"',
        "log.warning(a, b + 1)",
        "def two(a: 'a < 1') -> 1 + 2: ...",
        "b = a + 'text'",
    ],
)
def test_texts_annotations_and_logging_do_not_change(code: str, tmp_path: Path) -> None:
    assert changes(tree(tmp_path, trainer__one=body(code))) == set()


def test_a_repr_does_not_change(tmp_path: Path) -> None:
    assert ("1 + 1", "1 - 1") not in changes(tree(tmp_path, trainer__few=CODE))


def test_the_same_mutants_are_drawn_again(tmp_path: Path) -> None:
    root = tree(tmp_path, trainer__few=CODE)
    first = mutants.drawn([root], 5, ["trainer"])
    assert len(first) == 5
    assert mutants.drawn([root], 5, ["trainer"]) == first


def test_only_mutants_that_all_trees_have_are_drawn(tmp_path: Path) -> None:
    first = tree(tmp_path / "first", trainer__one="def one(a):\n    return a < 1 or a > 2\n")
    second = tree(tmp_path / "second", teachers__two="def one(a):\n    b = a < 1\n    return b\n")
    found = mutants.drawn([first, second], 9, ["trainer"])
    assert {one.expression for one in found} == {"a < 1"}


# ── where a mutant is ──────────────────────────────────────────────────────────────────────────

SMALLER = Mutant("trainer.one:One.smaller", "a < 1", "a <= 1")
METHOD = "class {}:\n    def {}(self, a):\n        return a < 1\n"


@pytest.mark.parametrize(
    "files",
    [
        {"trainer__one": METHOD.format("One", "smaller")},
        {
            "trainer__one": METHOD.format("One", "smaller"),
            "trainer__two": METHOD.format("One", "smaller"),
        },
        {"async_opd__queue__moved": METHOD.format("One", "smaller")},
        {"trainer__one": METHOD.format("Renamed", "_smaller")},
    ],
    ids=["same name", "same name beside another", "other module", "other class, private"],
)
def test_a_mutant_is_found(files: dict[str, str], tmp_path: Path) -> None:
    root = tree(tmp_path, **files)
    found = located(root, SMALLER)
    assert found
    assert found[0].path == root / f"{next(iter(files)).replace('__', '/')}.py"


@pytest.mark.parametrize(
    "files",
    [
        {"trainer__one": METHOD.format("One", "larger")},
        {"trainer__one": METHOD.format("One", "smaller").replace("1", "2")},
        {"trainer__one": METHOD.format("One", "smaller").replace("a < 1", "a < 1 or a < 1")},
        {
            "trainer__two": METHOD.format("One", "smaller"),
            "trainer__three": METHOD.format("One", "smaller"),
        },
    ],
    ids=["no function", "other expression", "twice in the function", "in two modules"],
)
def test_a_mutant_is_gone(files: dict[str, str], tmp_path: Path) -> None:
    assert located(tree(tmp_path, **files), SMALLER) is None


# ── what it changes ────────────────────────────────────────────────────────────────────────────


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A tree whose modules ``few_of_mutants`` and ``holder_of_mutants`` can be imported."""
    holder = "from few_of_mutants import opened\n"
    root = tree(tmp_path / "trainer", few_of_mutants=CODE, holder_of_mutants=holder)
    monkeypatch.syspath_prepend(root)
    return root.parent


def imported(name: str, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.delitem(sys.modules, name, raising=False)
    return importlib.import_module(name)


def changed(root: Path, function: str, expression: str, change: str) -> None:
    mutant = Mutant(f"trainer.few_of_mutants:{function}", expression, change)
    found = located(root, mutant)
    assert found
    replace(live(root)[found[0].key], changed_code(*found, mutant))


def test_a_change_holds_where_a_decorated_function_was_imported(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    few = imported("few_of_mutants", monkeypatch)
    holder = imported("holder_of_mutants", monkeypatch)
    changed(root, "opened", "strict is True", "strict is not True")
    with holder.opened() as strict, few.opened() as same:
        assert (strict, same) == (False, False)


def test_a_change_holds_in_a_method_that_calls_super(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    few = imported("few_of_mutants", monkeypatch).Few([1, 2])
    assert few.size() == 3
    changed(root, "Few.size", "super().size() + len(self.rows)", "super().size() - len(self.rows)")
    assert few.size() == -1


def test_a_change_holds_in_a_validator_of_pydantic(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    few = imported("few_of_mutants", monkeypatch)
    assert few.Config(rows=1).rows == 1
    changed(root, "Config._has_rows", "self.rows < 1", "self.rows <= 1")
    with pytest.raises(ValueError, match="no rows"):
        few.Config(rows=1)


def test_a_change_without_super_is_not_made(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    imported("few_of_mutants", monkeypatch)
    with pytest.raises(NotReplaced, match="other variables"):
        changed(root, "Few.size", "return super().size() + len(self.rows)", "return None")


# ── a run ──────────────────────────────────────────────────────────────────────────────────────

SMALL = """
def larger(a):
    return a + 1

def unread(a):
    return a + 2

def ending(a):
    if a > 1:
        import os
        os._exit(0)
"""
TESTS = """
from trainer.small import ending, larger

def test_larger():
    assert larger(1) == {}

def test_ending():
    ending(1)
"""


def outcome(root: Path, *expressions: tuple[str, str, str]) -> subprocess.CompletedProcess[str]:
    """The benchmark's run with some mutants of ``trainer.small``."""
    stored = [[f"trainer.small:{function}", *rest] for function, *rest in expressions]
    (root / "trainer" / "__init__.py").touch()
    file = root / "stored.yaml"
    file.write_text(yaml.safe_dump({"few": {"tests": ["tests"], "mutants": stored}}))
    command = [sys.executable, "-m", "benchmarks.mutants", "--root", root, "--stored", file]
    environment = os.environ | {"PYTEST_ADDOPTS": ""}
    return subprocess.run(
        command, env=environment, capture_output=True, text=True, timeout=120, check=False
    )


def test_a_run_counts_its_mutants(tmp_path: Path) -> None:
    root = tree(tmp_path, trainer__small=SMALL, tests__test_small=TESTS.format(2))
    done = outcome(
        root,
        ("larger", "a + 1", "a - 1"),
        ("unread", "a + 2", "a - 2"),
        ("ending", "a > 1", "a >= 1"),
        ("missing", "a < 2", "a <= 2"),
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "survived few trainer.small:unread: a + 2 → a - 2" in done.stdout
    assert "gone few trainer.small:missing: a < 2 → a <= 2" in done.stdout
    found = json.loads(done.stdout.splitlines()[-1])
    counts = {name: found[name] for name in ("caught", "survived", "gone", "mutants")}
    assert counts == {"caught": 2, "survived": 1, "gone": 1, "mutants": 4}
    assert found["share"] == 0.6667


def test_every_mutant_that_is_stored_has_one_place_in_the_code() -> None:
    rooms = yaml.safe_load((ROOT / "benchmarks" / "mutants.yaml").read_text())
    stored = [Mutant(*one) for room in rooms.values() for one in room["mutants"]]
    assert [one for one in stored if located(ROOT, one) is None] == []


def test_a_room_whose_tests_fail_without_a_change_is_an_error(tmp_path: Path) -> None:
    root = tree(tmp_path, trainer__small=SMALL, tests__test_small=TESTS.format(3))
    done = outcome(root, ("larger", "a + 1", "a - 1"))
    assert done.returncode == 1
    assert "error in few: caught without a change" in done.stdout
    assert "assert 2 == 3" in done.stdout
