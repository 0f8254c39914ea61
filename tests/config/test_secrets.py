"""Secrets are refused in configs, and never shown."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from async_opd.config.load import load_config
from async_opd.config.secrets import HIDDEN, Redactor, looks_secret, names_secret, take_out
from async_opd.core.errors import ConfigError
from async_opd.core.samples import DeadLetter, Header
from async_opd.observability.run_log import RunLog
from tests.world.cli import Cli

KEY = "sk-" + "a1B2" * 8
GOOD = """
student: {model: student}
teachers: {math: {model: teacher}}
data: {train: train.jsonl}
"""


@pytest.mark.parametrize("name", ["api_key", "hf_token", "KEY", "wandb-api-key", "db.password"])
def test_names_that_say_secret(name: str) -> None:
    assert names_secret(name)


@pytest.mark.parametrize(
    "name", ["max_tokens", "tokens_per_micro_batch", "api_key_env", "eos_token", "keys", "monkey"]
)
def test_names_that_do_not(name: str) -> None:
    assert not names_secret(name)


@pytest.mark.parametrize(
    "value",
    [KEY, "hf_" + "x" * 34, "ghp_" + "x" * 36, "https://me:pass@host/v1", "Bearer abcdefghij"],
)
def test_values_of_the_shape_of_a_key(value: str) -> None:
    assert looks_secret(f"see {value}")


@pytest.mark.parametrize("value", ["task-specific-model-of-mine", "https://host:80/v1", "a@b:c"])
def test_values_that_are_none(value: str) -> None:
    assert not looks_secret(value)


def test_every_secret_of_a_tree_is_found_and_hidden() -> None:
    tree: Any = {
        "a": {"api_key": "x", "api_key_env": "MY_KEY", "max_tokens": 8},
        "b": [{"url": "https://me:pass@host"}, KEY],
        KEY: 1,
        "token": {"name": "fine"},
        "rollout": {"max_token": 8, "token": 12345678, "password": 1234},
        "hf_token": ["first"],
    }
    assert sorted(take_out(tree)) == [
        *(HIDDEN, "a.api_key", "b.0.url", "b.1", "hf_token.0"),
        *("rollout.password", "rollout.token"),
    ]
    assert tree["a"] == {"api_key": HIDDEN, "api_key_env": "MY_KEY", "max_tokens": 8}


def problems(tmp_path: Path, text: str, *overrides: str) -> str:
    file = tmp_path / "config.yaml"
    file.write_text(text)
    with pytest.raises(ConfigError) as caught:
        load_config(file, overrides)
    return str(caught.value)


@pytest.mark.parametrize(
    "section",
    [
        "rollout: {engine: {extra: {hf_token: hunter22}}}",
        "api_key: hunter22",
        "log: {api_key: hunter22}",
        "train: {lr: {secret: hunter22}}",
        "hunter: &h {password: hunter22}\nagain: *h",
    ],
)
def test_a_config_that_holds_a_secret_is_refused_without_showing_it(
    tmp_path: Path, section: str
) -> None:
    said = problems(tmp_path, GOOD + section)
    assert "holds a secret" in said
    assert "environment variable" in said
    assert "hunter22" not in said


def test_a_key_in_place_of_the_name_of_its_variable_is_not_shown(tmp_path: Path) -> None:
    teacher = "{kind: endpoint, urls: ['http://h:1'], served_model: m, api_key_env: hunter-22}"
    said = problems(tmp_path, GOOD, f"teachers.math={teacher}")
    assert "the name of an environment variable, not the key" in said
    assert "hunter" not in said


@pytest.mark.parametrize(
    "override",
    [
        "teachers.math.api_key=hunter22",
        "teachers.math.api_key=[hunter22",
        "log.secret.x=hunter22",
        f"name={KEY}",
        f"name=[{KEY}",
        f"{KEY}",
    ],
)
def test_an_override_that_holds_a_secret_is_refused_without_showing_it(
    tmp_path: Path, override: str, cli: Cli
) -> None:
    file = tmp_path / "config.yaml"
    file.write_text(GOOD)
    said = "".join(cli("check", file, override, code=2))
    assert KEY not in said
    assert "api_key" not in override or "hunter22" not in said


def test_values_of_secret_variables_are_redacted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SOME_API_KEY", "correct horse battery")
    monkeypatch.setenv("MY_ACCESS", "named by the config")
    config = {"teachers": {"a": {"api_key_env": "MY_ACCESS"}}}
    said = Redactor(config)("401 for correct horse battery, 403 for named by the config")
    assert said == f"401 for {HIDDEN}, 403 for {HIDDEN}"


@given(before=st.text(), after=st.text())
def test_a_key_is_redacted_whatever_stands_around_it(before: str, after: str) -> None:
    assert KEY not in Redactor()(f"{before} {KEY} {after}")


def test_a_runs_files_hold_no_secret(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", "correct horse battery")
    file = tmp_path / "config.yaml"
    file.write_text(GOOD + "log: {console: off, wandb: off}")
    words = f"the endpoint refused {KEY} and correct horse battery"
    with RunLog(load_config(file), tmp_path / "run", sinks=[]) as log:
        log.message(words)
        log.dead_letter(DeadLetter(Header("p/0", 1, 0, 0, "math"), words))
        log.finish("failed", words)
    written = [path.read_text() for path in (tmp_path / "run").iterdir()]
    assert len(written) == 4
    assert not any(KEY in text or "horse" in text for text in written)
    assert HIDDEN in json.loads((tmp_path / "run" / "summary.json").read_text())["error"]
