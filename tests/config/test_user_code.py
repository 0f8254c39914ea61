"""Graders, loggers, sources and transports of an installed package, by name or by entry point."""

from __future__ import annotations

import sys
import zipfile
from pathlib import Path

import pytest

from async_opd.checks.preflight import preflight
from async_opd.config.load import load_config
from async_opd.config.run_config import RunConfig
from async_opd.config.user_code import (
    GRADER_GROUP,
    LOGGER_GROUP,
    MAX_PARSED_BYTES,
    UserCodeError,
    find_user_code,
    fits,
    user_object,
)
from async_opd.core.errors import ConfigError, SourceError
from async_opd.core.row import Row
from async_opd.data.user import UserSource
from async_opd.grading.graders import load_grader
from async_opd.observability.loggers import logger_sinks
from async_opd.observability.sinks import Summary
from rollouter.transports import chosen, transport
from tests.checks.inputs import EXAMPLE, FEW, config, one

PACKAGE = """
WRITTEN = []

def short(response, row):
    return 1.0 if len(response) < 3 else 0.0

class Kept:
    def __init__(self, config, run_dir):
        self.name = config["name"]
    def write(self, step, metrics):
        WRITTEN.append((self.name, step, dict(metrics)))
    def end(self, summary):
        WRITTEN.append(summary.status)

def alone(config):
    return None

def rows(count):
    yield {"prompt": "a", "data_source": "s"}
    yield "no mapping"
    if count > 2:
        raise RuntimeError("the database is closed")
    yield {"prompt": "b", "data_source": "s"}
"""
ENTRY_POINTS = """
[async_opd.graders]
brief = package_of_a_user:short
[async_opd.loggers]
kept = package_of_a_user:Kept
[async_opd.transports]
copied = rollouter.transports.gloo
"""


@pytest.fixture(autouse=True)
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "package_of_a_user.py").write_text(PACKAGE)
    info = tmp_path / "package_of_a_user-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: package-of-a-user\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(ENTRY_POINTS)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "package_of_a_user", raising=False)


def test_an_object_is_named_by_its_file(tmp_path: Path) -> None:
    file = tmp_path / "package_of_a_user.py"
    find_user_code(f"{file}:short", GRADER_GROUP)
    assert user_object(f"{file}:short", GRADER_GROUP)("ab", None) == 1.0


@pytest.mark.parametrize("name", ["package_of_a_user.py:long", "lacking.py:short"])
def test_an_object_that_is_not_in_its_file_is_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(UserCodeError, match="cannot be found"):
        find_user_code(str(tmp_path / name), GRADER_GROUP)
    with pytest.raises(UserCodeError, match="cannot be loaded"):
        user_object(str(tmp_path / name), GRADER_GROUP)


@pytest.mark.parametrize("name", ["brief", "package_of_a_user:short"])
def test_a_grader_is_named_by_entry_point_or_by_function(name: str) -> None:
    grader = load_grader(name)
    row = Row("0:0", "s", "p", None, {})
    assert (grader("ab", row), grader("abc", row)) == (1.0, 0.0)


@pytest.mark.parametrize("name", ["kept", "package_of_a_user:Kept"])
def test_a_logger_gets_rows_and_the_end(name: str, tmp_path: Path) -> None:
    (sink,) = logger_sinks(config(f"log.loggers=['{name}']"), tmp_path, resumed=False)
    sink.log(1, {"loss/total": 0.5})
    sink.close(Summary("completed", None, 1, 1.0, tmp_path))
    import package_of_a_user  # type: ignore[import-not-found]

    assert package_of_a_user.WRITTEN == [("quickstart", 1, {"loss/total": 0.5}), "completed"]


def test_an_unknown_logger_is_refused_while_the_config_is_read() -> None:
    with pytest.raises(ConfigError, match="module:function or an entry point, not 'wandbb'"):
        load_config(EXAMPLE, [*FEW, "log.loggers=[wandbb]"])


@pytest.mark.parametrize(
    ("name", "cause"),
    [
        ("package_of_a_user:nothing", "AttributeError"),
        ("no_such_package:kept", "ModuleNotFoundError"),
        ("package_of_a_user:alone", "does not fit: too many positional arguments"),
        ("package_of_a_user:WRITTEN", "is list, which cannot be called"),
    ],
)
def test_a_logger_that_cannot_be_made_is_refused_before_a_run(name: str, cause: str) -> None:
    problem = one(f"log.loggers=['{name}']", load=True)
    assert problem.key == "log.loggers"
    assert cause in problem.message


def test_a_name_without_an_entry_point_is_refused_with_those_that_are_installed() -> None:
    for use in (user_object, find_user_code):
        with pytest.raises(
            UserCodeError, match=r"'keptt' of async_opd.loggers \(installed: .*kept"
        ):
            use("keptt", LOGGER_GROUP)


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("def made(): pass", "made"),
        ("class Made:\n    def by(self): pass", "Made.by"),
        ("try:\n    import json as made\nexcept ImportError:\n    made = None", "made"),
        ("from elsewhere import *", "made"),
        ("def __getattr__(name): ...", "made"),
        ("globals()['made'] = 1", "made"),
        ("from .made import other", "made"),
        ("# " + "x" * MAX_PARSED_BYTES, "made"),
    ],
)
def test_a_module_that_binds_the_name_is_found(tmp_path: Path, text: str, name: str) -> None:
    (tmp_path / "found_here.py").write_text(text)
    find_user_code(f"found_here:{name}", LOGGER_GROUP)


@pytest.mark.parametrize(
    ("text", "cause"),
    [
        ("made = 1", "found_here.py has no other"),
        ("def other(:", "SyntaxError"),
        ("other = " + "(" * 5000, "SyntaxError|MemoryError|RecursionError"),
        ("\0", "SyntaxError|ValueError"),
    ],
)
def test_a_module_that_cannot_have_the_name_is_refused(
    tmp_path: Path, text: str, cause: str
) -> None:
    (tmp_path / "found_here.py").write_text(text)
    with pytest.raises(UserCodeError, match=cause):
        find_user_code("found_here:other", LOGGER_GROUP)


@pytest.mark.parametrize("module", ["", "no_such", "package_of_a_user.inner", "a..b", "__main__"])
def test_a_module_that_is_not_there_is_refused(module: str) -> None:
    with pytest.raises(UserCodeError, match="cannot be found: "):
        find_user_code(f"{module}:f", LOGGER_GROUP)


def test_a_module_in_a_folder_without_init_and_one_of_c_are_found(tmp_path: Path) -> None:
    (tmp_path / "bare" / "inner").mkdir(parents=True)
    (tmp_path / "bare" / "inner" / "leaf.py").write_text("def f(): ...")
    find_user_code("bare.inner.leaf:f", LOGGER_GROUP)
    find_user_code("math:sqrt", LOGGER_GROUP)


def test_a_module_in_an_archive_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with zipfile.ZipFile(tmp_path / "archive.zip", "w") as archive:
        archive.writestr("in_archive.py", "def f(): ...")
    monkeypatch.syspath_prepend(str(tmp_path / "archive.zip"))
    find_user_code("in_archive:f", LOGGER_GROUP)


@pytest.mark.parametrize(
    ("part", "others"),
    [("eval", ["checkpoint.keep_best=eval/mine/accuracy"]), ("train", ["data.overlong=filter"])],
)
def test_rows_of_a_source_that_was_found_only_may_be_as_the_config_needs_them(
    tmp_path: Path, part: str, others: list[str]
) -> None:
    (tmp_path / "found_here.py").write_text("def rows(): ...")
    file = FEW[0].partition("[")[2].rstrip("]")
    both = f"data.{part}=[{file}, {{kind: user, function: 'found_here:rows'}}]"
    assert preflight(config(both, *others), "c.yaml").problems == []


def test_an_option_may_have_any_name() -> None:
    fits(lambda *, name, function: None, "of_a_user:rows", name="a", function="b")


def source(**options: int) -> UserSource:
    return UserSource(kind="user", function="package_of_a_user:rows", options=dict(options))


def test_a_source_begins_at_any_position_and_names_bad_rows() -> None:
    data = config().data
    first, bad, last = source(count=2).rows(4, data)
    assert isinstance(first, Row)
    assert (first.uid, first.prompt) == ("4:0", "a")
    assert isinstance(bad, SourceError)
    assert (bad.row, bad.message) == (2, "is str, not a mapping")
    assert list(source(count=2).rows(4, data, start=2)) == [last]


@pytest.mark.parametrize(
    ("options", "cause"),
    [
        ({"count": 3}, "failed after 2 rows: RuntimeError: the database is closed"),
        ({"most": 3}, "does not fit: missing a required argument: 'count'"),
    ],
)
def test_a_source_that_fails_says_why(options: dict[str, int], cause: str) -> None:
    with pytest.raises(SourceError, match=cause):
        list(source(**options).rows(0, config().data))


@pytest.mark.parametrize("name", ["copied", "rollouter.transports.gloo:"])
def test_a_transport_is_named_by_entry_point_or_by_module(name: str) -> None:
    made = config(f"sync.backend='{name}'")
    assert [preflight(made, "c.yaml", 0, load).problems for load in (False, True)] == [[], []]
    assert RunConfig.model_validate(made.model_dump(by_alias=True)) == made
    assert transport(chosen(made.sync.backend, "cpu")).__name__ == "rollouter.transports.gloo"


def test_a_module_that_is_no_transport_is_refused_by_its_file_too() -> None:
    problem = one("sync.backend='package_of_a_user:'")
    assert problem.key == "sync.backend"
    assert problem.message.endswith("package_of_a_user.py has no DEVICES, sender, receiver")


def test_a_module_that_is_no_transport_is_refused_before_a_run() -> None:
    problem = one("sync.backend='package_of_a_user:'", load=True)
    assert (problem.key, problem.message) == (
        "sync.backend",
        "package_of_a_user: is not a module with DEVICES, sender, receiver",
    )


def test_an_unknown_transport_is_refused_while_the_config_is_read() -> None:
    with pytest.raises(ConfigError, match=r"sync\.backend.*'glo'"):
        load_config(EXAMPLE, [*FEW, "sync.backend=glo"])
