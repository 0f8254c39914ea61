"""Keys: they come from the environment of who needs them, and are shown and handed on nowhere."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import pytest

from async_opd.cli import main
from async_opd.config.load import load_config
from async_opd.config.secrets import (
    HIDDEN,
    Redactor,
    looks_like_a_variable,
    looks_secret,
    names_secret,
    take_out,
    without_secret_variables,
    without_secrets,
)
from async_opd.config.sections.evaluation import GradingConfig
from async_opd.core.errors import ConfigError, StageError
from async_opd.core.row import Row
from async_opd.grading.grader_pool import Graders, GraderSpec
from teachers.endpoint.replica import EndpointReplica
from teachers.endpoint.spec import endpoint_spec
from tests.fuzz.command import STUDENT, command, good, written

HEX = "0123456789abcdef0123456789abcdef01234567"
SHAPES = {
    "GitLab": "glpat-" + "a1B2" * 5,
    "Groq": "gsk_" + "a1B2" * 13,
    "NVIDIA": "nvapi-" + "a1B2_" * 12,
    "xAI": "xai-" + "a1B2" * 20,
    "wandb": HEX,
    "wandb, newer": "wandb_v1_" + "a1B2" * 10,
    "JSON web token": "eyJhbGciOiJIUzI1NiJ9.eyJzdWIiOiIxMjM0In0.c2lnbmF0dXJl",
    "temporary AWS": "ASIA" + "A1B2" * 4,
    "AWS session": "IQoJb3JpZ2luX2VjE" + "a1B2" * 20,
    "Stripe": "sk_live_" + "a1B2" * 6,
    "private key": "-----BEGIN RSA PRIVATE KEY-----",
    "user of a URL": "https://hunter22@host/v1",
    "query of a URL": "https://host/v1?model=a&apiKey=hunter22",
}


@pytest.mark.parametrize("value", SHAPES.values(), ids=SHAPES)
def test_a_key_of_each_kind_is_known_by_its_shape(value: str) -> None:
    assert looks_secret(value)
    assert value not in Redactor()(f"said {value} and more")
    assert list(take_out({"a": {"b": value}})) == ["a.b"]


@pytest.mark.parametrize(
    "value",
    [
        f"/home/me/.cache/models--a--b/snapshots/{HEX}/config.json",
        "global-attention-long-context-model",
        "https://host/v1?model=a&max_tokens=8",
        "mailto:a@b.c",
        "a sentence about a key, a token and a secret",
    ],
)
def test_what_only_resembles_a_key_is_none(value: str) -> None:
    assert not looks_secret(value)
    assert Redactor()(value) == value


SECRET_NAMES = (
    "apiKey accessToken clientSecret apikey authToken AWS_SECRET_ACCESS_KEY dbPassword api_keys "
    "sessionToken x-api-key passphrase"
)


@pytest.mark.parametrize("name", SECRET_NAMES.split())
def test_names_that_say_secret_in_every_spelling(name: str) -> None:
    assert names_secret(name)


@pytest.mark.parametrize("name", ["eosToken", "maxTokens", "monkey", "PWD", "OLDPWD", "keyboard"])
def test_names_that_do_not(name: str) -> None:
    assert not names_secret(name)


def test_a_revision_is_no_key_although_it_has_its_shape() -> None:
    tree: Any = {"student": {"revision": HEX}, "name": HEX}
    assert without_secrets(tree)["student"]["revision"] == HEX
    assert list(take_out(tree)) == ["name"]


def test_a_secret_of_a_query_is_hidden_and_the_rest_stays() -> None:
    said = Redactor()("GET https://h/v1?model=a&api_key=hunter22&n=1 failed")
    assert said == f"GET https://h/v1?model=a&api_key={HIDDEN}&n=1 failed"


SERVER = {"kind": "endpoint", "served_model": "m"}


def config_of(tmp_path: Path, **server: Any) -> Path:
    config = good(tmp_path)
    config["teachers"]["sort"] = {**SERVER, "urls": ["https://localhost:1"], **server}
    return written(tmp_path, config)


def test_the_command_hides_the_value_of_a_variable_that_the_config_names(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MY_ACCESS", "correct horse battery")
    file = config_of(tmp_path, api_key_env="MY_ACCESS")
    for override in ("name=correct horse battery", "rollout.n=correct horse battery"):
        said = command("check", str(file), override, "train.lr=nothing")
        assert said.code == 2
        assert "horse" not in said.err
    said = command("check", str(file), "name=correct horse battery")
    assert "horse" not in said.err + said.out


@pytest.mark.parametrize("key", ["hunter22hunter22", "ABCDEFGHIJKLMNOPQRSTUVWX", "a_b_c_9f8e7d"])
def test_a_key_in_place_of_its_variables_name_is_not_shown(tmp_path: Path, key: str) -> None:
    said = command("check", str(config_of(tmp_path, api_key_env=key)))
    assert said.code == 2
    assert "api_key_env" in said.err
    assert key not in said.err + said.out


@pytest.mark.parametrize(
    "override",
    [
        "teachers.sort.urls=[http://10.0.0.7]",
        "teachers.sort.api_key_env.x=1",
        "student.api_key_env=hunter22",
        "teachers.sort.health=1",
    ],
)
def test_an_error_beside_it_does_not_show_it_either(tmp_path: Path, override: str) -> None:
    said = command("check", str(config_of(tmp_path, api_key_env="hunter22")), override)
    assert said.code == 2
    assert "hunter22" not in said.err + said.out


def test_names_of_variables_are_shown() -> None:
    assert all(map(looks_like_a_variable, ("SORTER_KEY", "HF_TOKEN", "KEY_2", "HOME")))


@pytest.mark.parametrize("url", ["https://hunter22@host", "https://host/v1?apiKey=hunter22"])
def test_a_key_in_a_servers_url_is_refused_and_not_shown(tmp_path: Path, url: str) -> None:
    said = command("check", str(config_of(tmp_path, urls=[url])))
    assert said.code == 2
    assert "holds a secret" in said.err
    assert "hunter22" not in said.err


@pytest.mark.parametrize(
    ("url", "more", "refused"),
    [
        ("http://10.0.0.7:8000", {}, True),
        ("http://localhost.example.org", {}, True),
        ("http://10.0.0.7:8000", {"allow_http_key": True}, False),
        ("http://127.0.0.1:8000", {}, False),
        ("http://[::1]:8000", {}, False),
        ("http://localhost:8000", {}, False),
        ("https://10.0.0.7:8000", {}, False),
    ],
)
def test_a_key_goes_over_http_only_where_it_is_asked_for(
    tmp_path: Path, url: str, more: dict[str, Any], refused: bool
) -> None:
    file = config_of(tmp_path, urls=[url], api_key_env="SORTER_KEY", **more)
    if not refused:
        load_config(file)
        return
    with pytest.raises(ConfigError, match="allow_http_key: true"):
        load_config(file)


def replica(file: Path) -> EndpointReplica:
    config = load_config(file, [f"student.model={STUDENT}"])
    teacher: Any = config.teachers["sort"]
    return EndpointReplica(endpoint_spec(config, teacher, "teacher sort/0", teacher.urls[0]))


def test_a_client_that_travels_does_not_carry_its_key(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SORTER_KEY", "correct horse battery")
    packed = pickle.dumps(replica(config_of(tmp_path, api_key_env="SORTER_KEY")))
    assert b"horse" not in packed
    assert b"SORTER_KEY" in packed


async def test_a_process_without_the_key_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("SORTER_KEY", raising=False)
    with pytest.raises(
        StageError, match=r"lacks the variable that api_key_env names.*\n.*ray start"
    ):
        await replica(config_of(tmp_path, api_key_env="SORTER_KEY")).ready()


def test_what_holds_a_secret_by_name_or_shape_is_left_out_of_an_environment() -> None:
    environ = {"PATH": "/bin", "HF_TOKEN": "x", "PROXY": "http://me:pass@host", "MINE": "y"}
    assert without_secret_variables(environ) == {"PATH": "/bin", "MINE": "y"}
    assert without_secret_variables(environ, ["MINE"], ["HF_TOKEN"]) == {
        "PATH": "/bin",
        "HF_TOKEN": "x",
    }


GRADER = """
import os


def grade(response, row):
    return float(any("horse" in value for value in os.environ.values()))
"""


@pytest.mark.parametrize(("given", "seen"), [((), 0.0), (("JUDGE_KEY",), 1.0)])
async def test_a_grader_inherits_the_secrets_that_it_is_given(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, given: tuple[str, ...], seen: float
) -> None:
    (tmp_path / "judge_of_this_test.py").write_text(GRADER)
    monkeypatch.syspath_prepend(str(tmp_path))
    for name in ("JUDGE_KEY", "MY_ACCESS", "HF_TOKEN"):
        monkeypatch.setenv(name, "correct horse battery")
    limits = GradingConfig(processes=1, pass_env=list(given))
    spec = GraderSpec("judge_of_this_test:grade", limits, 60, ("MY_ACCESS",))
    graders = Graders(spec)
    try:
        assert await graders.grade("a", Row("0:0", "s", "p", "a", {})) == seen
    finally:
        graders.close()


def test_a_graders_bounds_know_the_variables_that_the_config_names(tmp_path: Path) -> None:
    config = load_config(config_of(tmp_path, api_key_env="MY_ACCESS"), ["grading.pass_env=[A]"])
    spec = GraderSpec.of(config, "math_verify")
    assert (spec.hidden_env, spec.limits.pass_env) == (("MY_ACCESS",), ["A"])
    assert GradingConfig().pass_env == []


def test_an_unknown_option_that_is_a_key_is_not_shown(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["check", "c.yaml", f"--key={SHAPES['Groq']}"])
    assert SHAPES["Groq"] not in capsys.readouterr().err
