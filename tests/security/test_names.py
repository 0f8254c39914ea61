"""Names in a config: refused where they could command a terminal, and escaped in old runs."""

from __future__ import annotations

import argparse
import io
import json
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, Union, get_args, get_origin

import pytest
import yaml
from pydantic import BaseModel

from async_opd.config.load import load_config, load_recorded_config
from async_opd.config.overrides import completions
from async_opd.config.run_config import RunConfig
from async_opd.config.sections.section import MAX_NAME, Name
from async_opd.config.yaml_text import load_yaml
from async_opd.core.errors import ConfigError
from async_opd.files.run_format import write_run_format
from async_opd.observability.live.console import LiveConsole, PlainConsole
from async_opd.observability.live.view_state import ViewState
from async_opd.observability.terminal import terminal_on
from async_opd.tools.first_steps.draft import config_text
from async_opd.tools.importing.command import imported
from tests.fuzz.command import command, good, written
from tests.security.test_terminal import CLEAR, HOSTILE, TITLE, commands

pytestmark = pytest.mark.slow

PATHS = {
    *("run_dir", "model", "chat_template_file", "path", "image_folder", "id", "files", "mirror"),
    *("urls", "address", "served_model"),
}
"""A server calls a model by its path unless it is given another name."""
TEXTS = {"system_prompt", "response_prefix", "prompt_template", "image_placeholder"}
OTHERS = {"grader", "factory", "tools", "targets", "template_date", "labels", "resources"}
OPTIONS = {
    *("options", "extra", "processor_kwargs", "chat_template_kwargs", "kwargs", "env"),
    "runtime_env",
}
"""Keys whose texts are not names; every output that shows one escapes it."""


def naming(folder: Path, name: str) -> dict[str, Any]:
    """A config of which every part has this name."""
    tree = good(folder)
    row = {"path": "train.jsonl", "data_source": name}
    return tree | {
        "name": name,
        "teachers": {name: tree["teachers"]["sort"] | {"sources": [name]}},
        "data": {"train": [row, {"kind": "reasoning_gym", "task": name}], "route_by": name},
        "log": {"wandb": "off", "project": name},
    }


@pytest.mark.parametrize("name", [TITLE, CLEAR, "a\nb", "\u202eab", "a\u2028b", "a" * 101])
def test_a_name_that_does_not_fit_on_a_line_is_refused_with_all_others(
    tmp_path: Path, name: str
) -> None:
    said = command("check", str(written(tmp_path, naming(tmp_path, name) | {"seed": "x"})))
    assert said.code == 2
    assert commands(said.err) == []
    for key in ("name", "teachers.", "sources.0", "data_source", "task", "route_by", "log.project"):
        assert key in said.err
    assert said.err.count(f"a name of at most {MAX_NAME} printable characters on one line") == 7
    assert "seed" in said.err


@pytest.mark.parametrize("name", ["/tmp/a", "../a", "a/../../b"])
def test_the_name_of_a_run_does_not_lead_out_of_the_runs(tmp_path: Path, name: str) -> None:
    with pytest.raises(ConfigError, match="a name that does not lead out of runs/"):
        load_config(written(tmp_path, good(tmp_path) | {"name": name}))


def test_a_name_may_have_letters_of_any_language(tmp_path: Path) -> None:
    load_config(written(tmp_path, naming(tmp_path, "Lehrer für 数学 / a.b-c_d" + "x" * 70)))


def texts(annotation: Any) -> Iterator[bool]:
    """For each text in a value: whether it is a name, or has a form."""
    if annotation is str:
        yield False
    elif annotation == Name:
        yield True
    elif get_origin(annotation) in (Union, types.UnionType, list, tuple, dict, Annotated):
        for inner in get_args(annotation)[: 1 if get_origin(annotation) is Annotated else None]:
            yield from texts(inner)


def fields(section: type[BaseModel], seen: set[type]) -> Iterator[tuple[str, Any, Any]]:
    seen.add(section)
    for name, info in section.model_fields.items():
        yield name, info, info.annotation
        inner = [info.annotation]
        while inner:
            one = inner.pop()
            inner += get_args(one)
            if isinstance(one, type) and issubclass(one, BaseModel) and one not in seen:
                yield from fields(one, seen)


def test_every_text_of_a_config_is_a_name_or_has_a_reason_to_be_none() -> None:
    free = {
        name
        for name, info, annotation in fields(RunConfig, set())
        if not all(texts(annotation))
        and not any(hasattr(one, "pattern") and one.pattern for one in info.metadata)
        and not any("_printable" in str(one) for one in info.metadata)
    }
    assert free == PATHS | TEXTS | OTHERS | OPTIONS


@pytest.fixture
def old(tmp_path: Path) -> Path:
    """The directory of a run that had such names."""
    run_dir = tmp_path / "run"
    run_dir.mkdir()
    write_run_format(run_dir)
    (run_dir / "config.yaml").write_text(yaml.safe_dump(naming(tmp_path, HOSTILE)))
    row = {
        "step": 1,
        "time": 1.0,
        "perf/step_s": 1.0,
        f"teacher/{HOSTILE}/busy": 0.5,
        f"eval/{HOSTILE}/accuracy": 0.5,
    }
    (run_dir / "metrics.jsonl").write_text(json.dumps(row) + "\n")
    ended = {"status": "failed", "seconds": 1.0, "error": HOSTILE, f"eval/{HOSTILE}/accuracy": 0.5}
    (run_dir / "summary.json").write_text(json.dumps(ended))
    return run_dir


@pytest.mark.parametrize("name", ["watch", "report", "compare"])
@pytest.mark.usefixtures("one_bundle")
def test_a_run_that_had_them_is_still_read_and_commands_no_terminal(old: Path, name: str) -> None:
    runs = [str(old)] * (1 + (name == "compare"))
    said = command(name, *runs, *(["--out", str(old / "c.html")] if name == "compare" else []))
    assert said.code == 0, said
    assert commands(said.out + said.err) == []
    assert not any(line.startswith("2026-11-22T01:00:00") for line in said.out.splitlines())


def test_the_data_sources_of_rows_command_no_terminal(tmp_path: Path) -> None:
    row = {"prompt": "sort 210=", "data_source": HOSTILE, "answer": "012"}
    file = written(tmp_path, good(tmp_path) | {"log": {"wandb": "off"}})
    (tmp_path / "train.jsonl").write_text(json.dumps(row) + "\n")
    for said in (command("doctor", str(file)), command("check", str(file))):
        assert commands(said.out + said.err) == []
        lines = (said.out + said.err).splitlines()
        assert not any(line.startswith("2026-11-22T01:00:00") for line in lines)


def test_a_shell_completes_only_names_that_it_can_show(tmp_path: Path) -> None:
    file = written(tmp_path, {"teachers": {HOSTILE: {}, "a": {}, "b": {}}})
    assert completions("teachers.", argparse.Namespace(config=str(file))) == [
        "teachers.a.",
        "teachers.b.",
    ]


def test_their_config_is_read_as_it_is_by_what_is_given_a_run(old: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="printable"):
        load_config(old / "config.yaml")
    config, left_out = load_recorded_config(old / "config.yaml")
    assert (config.name, left_out) == (HOSTILE, [])
    assert load_config(old / "config.yaml", recorded=True) == config


def test_a_run_shows_the_name_of_such_a_teacher_escaped(old: Path) -> None:
    config, _ = load_recorded_config(old / "config.yaml")
    plain, live = io.StringIO(), io.StringIO()
    for console, out in (
        (PlainConsole(ViewState(config), plain), plain),
        (display := LiveConsole(ViewState(config), live), live),
    ):
        console.state.post(1, {r"teacher/\x1b]0;owned": 0.5})
        busy = f"{console.state.pools[1].name}/busy"
        if console is display:
            console.state.post(1, {busy: 0.5})
            terminal_on(out, plain=True).print(display.render())
        else:
            console.log(1, {busy: 0.5})
        assert "50%" in out.getvalue()
        assert commands(out.getvalue()) == []


def test_what_import_read_is_named_and_its_names_stay_in_the_comment(tmp_path: Path) -> None:
    private = tmp_path / "private\u2028evil: 1.yaml"
    private.write_text("policy: {model_name: mine}")
    child = tmp_path / f"a{TITLE}\u2028name: evil.yaml"
    child.write_text(yaml.safe_dump({"defaults": str(private), "loss_fn": {"kl_type": "forward"}}))
    _, text = imported(child, "nemo-rl")
    head = text[: text.index("name:")] if text.startswith("name:") else text.partition("\n#\n")[0]
    assert commands(text) == []
    assert str(tmp_path / "private") in head.replace("\n# ", "")
    assert load_yaml(text)["student"] == {"model": "mine"}
    assert "evil" not in load_yaml(text)
    said = command("import", str(child), "--output", str(tmp_path / f"out{TITLE}.yaml"))
    assert "wrote " in said.out
    assert commands(said.out) == []


def test_the_file_of_a_first_config_stays_in_its_comment() -> None:
    assert load_yaml(config_text({"name": "a"}, "b\nname: evil\u2028name: evil")) == {"name": "a"}
