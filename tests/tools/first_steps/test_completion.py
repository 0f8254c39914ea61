"""A shell completes commands, options and config keys."""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from pathlib import Path

import pytest

from async_opd.config.load import MAX_CONFIG_BYTES
from async_opd.config.overrides import completions
from tests.world.cli import Cli

EXAMPLE = str(Path(__file__).parents[3] / "examples" / "quickstart.yaml")


def keys(prefix: str, config: str | None = None) -> list[str]:
    return completions(prefix, argparse.Namespace(config=config))


def test_keys_are_completed_down_to_the_next_dot() -> None:
    assert {"name=", "train.", "async."} <= set(keys(""))
    assert {"train.steps=", "train.lora."} <= set(keys("train."))
    assert keys("train.st") == ["train.steps="]


def test_a_section_alone_is_completed_with_its_keys() -> None:
    assert {"rollout.n=", "rollout.engine."} <= set(keys("rollo"))


def test_teachers_have_the_names_of_the_config() -> None:
    assert keys("teachers.", EXAMPLE) == ["teachers.sort.", "teachers.reverse."]
    assert "teachers.sort.weight=" in keys("teachers.s", EXAMPLE)
    assert keys("teachers.", "/no/such.yaml") == []


def test_a_pipe_or_a_large_file_in_place_of_a_config_has_no_teachers(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.yaml")
    assert keys("teachers.", str(tmp_path / "pipe.yaml")) == []  # and nobody waits
    with (tmp_path / "large.yaml").open("w") as file:
        file.write("teachers: {sort: {}}\n#")
        file.truncate(MAX_CONFIG_BYTES + 1)
    assert keys("teachers.", str(tmp_path / "large.yaml")) == []


def test_a_config_may_be_a_link(tmp_path: Path) -> None:
    (tmp_path / "link.yaml").symlink_to(EXAMPLE)
    assert keys("teachers.", str(tmp_path / "link.yaml")) == ["teachers.sort.", "teachers.reverse."]


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_every_shell_has_a_script_for_the_command(shell: str, cli: Cli) -> None:
    assert "async_opd" in cli("completion", shell).out


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("async_opd quicks", ["quickstart"]),
        (f"async_opd check {EXAMPLE} --set teachers.sort.wei", ["teachers.sort.weight="]),
    ],
)
@pytest.mark.slow
def test_bash_completes_the_line(line: str, expected: list[str], tmp_path: Path) -> None:
    command = tmp_path / "async_opd"
    command.write_text(f'#!/bin/sh\nexec {sys.executable} -m async_opd "$@"\n')
    command.chmod(0o755)
    words = " ".join(line.split())
    script = f"""
    eval "$(async_opd completion bash)"
    COMP_LINE='{words}' COMP_POINT={len(words)} COMP_TYPE=9
    COMP_WORDBREAKS=$' \\t\\n'
    COMP_WORDS=({words}) COMP_CWORD=$((${{#COMP_WORDS[@]}} - 1))
    _python_argcomplete async_opd
    echo "${{COMPREPLY[@]}}"
    """
    environment = os.environ | {"PATH": f"{tmp_path}:{os.environ['PATH']}"}
    done = subprocess.run(
        ["bash", "-c", script], env=environment, capture_output=True, text=True, timeout=60
    )
    assert done.stdout.split() == expected, done.stderr
