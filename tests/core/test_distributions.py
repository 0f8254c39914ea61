"""Versions of libraries that async_opd was not tested with are named."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from async_opd.core.distributions import TESTED, untested
from async_opd.tools import check
from async_opd.tools.doctor.environment import environment
from tests.world.cli import Cli

ROOT = Path(__file__).parents[2]
HERE = {"vllm": "0.33.1", "torch": "2.13.1+cu130", "transformers": "5.20.0", "ray": "2.60.4"}


def installed(name: str) -> str:
    return HERE.get(name, "")


def test_only_releases_beyond_the_last_number_are_named() -> None:
    assert list(untested(installed)) == [
        "vllm 0.33.1 is not tested with async_opd, 0.32 is",
        "transformers 5.20.0 is not tested with async_opd, 5.19 is",
    ]


def test_doctor_warns_of_a_version_that_was_not_tested() -> None:
    has = {**HERE, "wandb": "0.31.0", "async-opd": "0.2.0"}
    warnings = [one.found for one in environment(has.get, []) if one.status == "warning"]
    assert warnings == [
        "transformers 5.20.0 is not tested, 5.19 is",
        "vllm 0.33.1 is not tested, 0.32 is",
    ]


def test_check_warns_of_a_version_that_was_not_tested(
    monkeypatch: pytest.MonkeyPatch, cli: Cli
) -> None:
    monkeypatch.setattr(check, "untested", lambda: untested(installed))
    printed = cli("check", ROOT / "examples" / "quickstart.yaml")
    assert "warning: vllm 0.33.1 is not tested with async_opd" in printed.out


def test_the_status_has_the_table_of_tested_versions() -> None:
    text = (ROOT / "docs" / "status.md").read_text().partition("## Tested versions")[2]
    rows = re.findall(r"^\| `([\w-]+)` \| (.*?) \|$", text, flags=re.MULTILINE)
    assert {name: tuple(found.split(", ")) for name, found in rows} == TESTED
