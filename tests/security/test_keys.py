"""Keys: each process reads its environment, and nothing shows them or passes them on."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import pytest

from async_opd.cli import main
from async_opd.config.keys import all_keys
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
from teachers.endpoint.replica import EndpointReplica, endpoint_spec
from tests.fuzz.command import STUDENT, command, good, written

pytestmark = pytest.mark.slow

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
    "Azure SAS": "https://acct.blob.core.windows.net/c/train.jsonl?sv=2024-11-04&sig=a1B2%2Fc3D4",
    "presigned S3": "https://b.s3.amazonaws.com/t.jsonl?X-Amz-Expires=9&X-Amz-Signature=0a1b2c",
    "presigned GCS": "https://storage.googleapis.com/b/t.jsonl?X-Goog-Signature=0a1b2c3d",
    "older presigned S3": "https://b.s3.amazonaws.com/t.jsonl?Expires=9&Signature=a1B2%2Fc3D4",
    "credential of a URL": "https://h/t.jsonl?X-Amz-Credential=a1B2%2F20260101",
    "Azure account": "DefaultEndpointsProtocol=https;AccountName=a;AccountKey=a1B2c3D4a1B2==",
    "Azure SAS of an account": "BlobEndpoint=https://a;SharedAccessSignature=sv=1&x=a1B2c3D4",
    "Azure service bus": "Endpoint=sb://a/;SharedAccessKeyName=n;SharedAccessKey=a1B2c3D4a1B2=",
    "database": "Server=h;Database=d;User Id=me;Password=hunter22",
    "Slack webhook": "https://hooks.slack.com/services/T00000000/B00000000/a1B2c3D4a1B2c3D4",
    "Discord webhook": "https://discord.com/api/webhooks/1234567/a1B2_c3D4-a1B2_c3D4",
    "Databricks": "dapi" + "0a1b2c3d" * 4,
    "SendGrid": "SG." + "a1B2" * 5 + "." + "c3D4" * 10,
    "Docker": "dckr_pat_" + "a1B2" * 7,
    "Together": "tgp_v1_" + "a1B2" * 10,
    "LangSmith": "lsv2_pt_" + "a1b2" * 8 + "_0a1b2c3d4e",
    "Telegram": "https://api.telegram.org/bot123456789:AA" + "a1B2_" * 7 + "/sendMessage",
    "PGP": "-----BEGIN PGP PRIVATE KEY BLOCK-----",
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
        "https://host/v1?design=a&signatures=2&sigma=3",
        "password=hunter22",
        "https://hooks.slack.com/docs",
    ],
)
def test_what_only_resembles_a_key_is_none(value: str) -> None:
    assert not looks_secret(value)
    assert Redactor()(value) == value


SECRET_NAMES = (
    "apiKey accessToken clientSecret apikey authToken AWS_SECRET_ACCESS_KEY dbPassword api_keys "
    "sessionToken x-api-key passphrase PGPASSWORD MYSQL_PWD GITHUB_PAT SSHPASS DB_PASS SENTRY_DSN "
    "AZURE_STORAGE_CONNECTION_STRING SLACK_WEBHOOK_URL DISCORD_WEBHOOK REDISCLI_AUTH HFTOKEN "
    "PASSWORD_OF_DB X-Amz-Credential AZURE_STORAGE_SAS"
)


@pytest.mark.parametrize("name", SECRET_NAMES.split())
def test_names_that_say_secret_in_every_spelling(name: str) -> None:
    assert names_secret(name)


NO_SECRET_NAMES = (
    "eosToken maxTokens monkey PWD OLDPWD keyboard bypass compass GIT_ASKPASS author SSH_AUTH_SOCK "
    "pattern signature_columns LANG"
)


@pytest.mark.parametrize("name", NO_SECRET_NAMES.split())
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


def test_no_key_of_a_config_has_the_name_of_a_secret() -> None:
    switch = "teachers.<name>.allow_http_key"  # only texts and numbers are secrets
    assert [key for key in all_keys() if names_secret(key)] == [switch]


def test_a_presigned_url_is_refused_in_a_config_and_not_shown(tmp_path: Path) -> None:
    config = good(tmp_path)
    config["data"]["train"] = [SHAPES["Azure SAS"]]
    said = command("check", str(written(tmp_path, config)))
    assert said.code == 2
    assert "holds a secret" in said.err
    assert "a1B2" not in said.err + said.out


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


@pytest.mark.parametrize(("given", "seen"), [((), 0.0), (("JUDGE_KEY",), 1.0), (("MY_OWN",), 1.0)])
async def test_a_grader_inherits_the_variables_that_it_is_given(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, given: tuple[str, ...], seen: float
) -> None:
    (tmp_path / "judge_of_this_test.py").write_text(GRADER)
    monkeypatch.syspath_prepend(str(tmp_path))
    for name in ("JUDGE_KEY", "MY_ACCESS", "HF_TOKEN", "MY_OWN"):
        monkeypatch.setenv(name, "correct horse battery")
    limits = GradingConfig(processes=1, pass_env=list(given))
    spec = GraderSpec("judge_of_this_test:grade", limits, 60, ("MY_ACCESS",))
    graders = Graders(spec)
    try:
        assert await graders.grade("a", Row("0:0", "s", "p", "a", {})) == seen
    finally:
        graders.close()


def test_a_grader_inherits_what_programs_need_and_no_other_variable(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    needed = {"PATH": "/bin", "LC_ALL": "C", "OMP_NUM_THREADS": "1", "HF_HOME": "/hf"}
    secret = {"PYTHON_KEY": "x", "https_proxy": "http://me:pass@host"}
    others = {
        "MYSQL_HOST": "h",
        "KUBECONFIG": "k",
        "RAY_AUTH_TOKEN_PATH": "/t",
        "PATH_TO_KEYS": "p",
    }
    for name, value in (needed | secret | others).items():
        monkeypatch.setenv(name, value)
    found = GraderSpec("exact", GradingConfig(), 60).environ()
    assert needed.items() <= found.items()
    assert not (secret | others).keys() & found.keys()


def test_a_graders_bounds_know_the_variables_that_the_config_names(tmp_path: Path) -> None:
    config = load_config(config_of(tmp_path, api_key_env="MY_ACCESS"), ["grading.pass_env=[A]"])
    spec = GraderSpec.of(config, "math_verify")
    assert (spec.hidden_env, spec.limits.pass_env) == (("MY_ACCESS",), ["A"])
    assert GradingConfig().pass_env == []


def test_an_unknown_option_that_is_a_key_is_not_shown(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["check", "c.yaml", f"--key={SHAPES['Groq']}"])
    assert SHAPES["Groq"] not in capsys.readouterr().err


@pytest.mark.parametrize("name", ["n_pass", "min_pass", "two_pass", "low_pass", "forward_pass"])
def test_a_number_of_passes_is_not_a_password(name: str) -> None:
    assert not names_secret(name)


@pytest.mark.parametrize("name", ["pass", "db_pass", "SMTP_PASS", "MYSQL_PASS", "SSHPASS"])
def test_a_password_may_be_called_pass(name: str) -> None:
    assert names_secret(name)


@pytest.mark.parametrize("piece", ["eyJaaaaaaaa-", "sk-aaaa.", "gsk_a-", "://a", "?a=b-", "a_"])
def test_no_text_of_a_config_takes_quadratic_time(piece: str) -> None:
    """A mebi of characters would take minutes."""
    assert not looks_secret(piece * ((1 << 20) // len(piece)))


@pytest.mark.parametrize("piece", ["1", "1_", ".1", "-", "["])
def test_no_value_of_a_config_takes_quadratic_time(tmp_path: Path, piece: str) -> None:
    """It would take a minute, which ``command`` does not wait for."""
    (tmp_path / "config.yaml").write_text(f"name: {piece * (100_000 // len(piece))}")
    assert command("check", str(tmp_path / "config.yaml")).code == 2
