"""docs/tutorial.md as a new user follows it: the wheel alone, an empty directory, its commands.

A line of a console block that begins with ``$`` is run (a backslash at its end continues it); lines
below it are found in what it prints, in this order. Numbers stand for any number, … for any text.
"""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

from tests.wheel import ROOT, environment, install_wheel

TEXT = (ROOT / "docs" / "tutorial.md").read_text()
NUMBER = r"\d[\d.,:-]*"


def steps() -> list[tuple[str, list[str]]]:
    """The commands, and the lines that each prints."""
    found = []
    for block in re.findall(r"```console\n(.*?)```", TEXT, flags=re.DOTALL):
        for part in re.split(r"^\$ ", block, flags=re.MULTILINE)[1:]:
            command, *lines = part.replace("\\\n", " ").splitlines()
            found.append((command, [line for line in lines if line.strip("… ")]))
    return found


def fixed(line: str) -> re.Pattern[str]:
    """The pattern of a line of the tutorial: its words, any numbers, any width of its spaces."""
    parts = re.split(rf"({NUMBER}|…|[━─]{{2,}})", " ".join(line.split()))
    kinds = [NUMBER if re.fullmatch(NUMBER, part) else re.escape(part) for part in parts]
    shown = [
        ".*" if part == "…" else "[━─]+" if re.fullmatch("[━─]{2,}", part) else kind
        for part, kind in zip(parts, kinds, strict=True)
    ]
    return re.compile("".join(shown))


def missing(lines: list[str], said: str) -> str | None:
    """The first line of the tutorial that a command did not print behind the ones before."""
    printed = iter(" ".join(line.split()) for line in said.splitlines())
    for line in lines:
        if not any(fixed(line).search(one) for one in printed):
            return line
    return None


@pytest.mark.engine
@pytest.mark.long
@pytest.mark.slow
def test_every_command_of_the_tutorial_prints_what_it_shows(tmp_path: Path) -> None:
    installed, empty = install_wheel(tmp_path / "wheel"), tmp_path / "empty"
    empty.mkdir()
    walked = steps()
    names = [command.split()[1] for command, _ in walked if command.startswith("async_opd")]
    assert names == ["quickstart", "init", "doctor", "probe", "run"]
    for command, lines in walked:
        done = subprocess.run(
            command,
            shell=True,
            cwd=empty,
            env=environment(installed),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,  # in the order of a terminal
            text=True,
            timeout=900,
            start_new_session=True,  # Linux shares cores among sessions first
        )
        said = done.stdout
        assert done.returncode == 0, f"{command}\n{said}"
        assert missing(lines, said) is None, f"{command}: no {missing(lines, said)!r} in\n{said}"
