"""Names, strings, docstrings, comments, docs and new commits are in plain words.

The files of ``tests/`` are not read yet.
"""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

from tests.language import findings

ROOT = Path(__file__).parent.parent
FOLDERS = ("async_opd", "rollouter", "trainer", "teachers", "benchmarks", "examples")
SINCE = "e9df0d2d21fe553586b9132178cf008709de28cb"
"""The commit whose descendants, and whose later lines of the change log, the rule reads."""
CODE = re.compile(r"```.*?```|`[^`\n]*`", re.DOTALL)


def of_files() -> dict[str, str]:
    """The files by their names; a document without its code."""
    files = [file for folder in FOLDERS for file in (ROOT / folder).rglob("*.py")]
    files += (ROOT / "docs").glob("*.py")
    found = {file: file.read_text() for file in files}
    pages = [*(ROOT / "docs").glob("*.md"), ROOT / "README.md", ROOT / "CONTRIBUTING.md"]
    found |= {page: without_code(page.read_text()) for page in pages}
    return {str(file.relative_to(ROOT)): text for file, text in sorted(found.items())}


def without_code(text: str) -> str:
    """The text without names and blocks of code, which are files' own; lines keep their numbers."""
    return CODE.sub(lambda match: "\n" * match[0].count("\n"), text)


def git(*arguments: str) -> str:
    """The output of a command of git; skips where the history is not there."""
    try:
        command = ["git", "-C", str(ROOT), *arguments]
        done = subprocess.run(command, capture_output=True, text=True, timeout=30, check=True)
    except (OSError, subprocess.CalledProcessError) as error:
        pytest.skip(f"no history of the repository: {error}")
    return done.stdout


def wrong(texts: dict[str, str]) -> str:
    """A line for each form that is not plain: where it is, and plain ones."""
    return "\n".join(
        f"{name}:{one.line}: {one.form!r} → {one.plain}"
        for name, text in texts.items()
        for one in sorted(findings(text))
    )


def test_files_are_in_plain_words() -> None:
    found = wrong(of_files())
    assert not found, found


def test_new_lines_of_the_change_log_are_in_plain_words() -> None:
    changed = git("diff", "--unified=0", SINCE, "--", "CHANGELOG.md").splitlines()
    new = "\n".join(line[1:] for line in changed if re.match(r"\+(?!\+\+)", line))
    found = wrong({"new lines of CHANGELOG.md": without_code(new)})
    assert not found, found


def test_subjects_of_new_commits_are_in_plain_words() -> None:
    lines = git("log", "--format=%h %s", "--ancestry-path", f"{SINCE}..HEAD").splitlines()
    found = wrong(dict(line.split(" ", 1) for line in lines))
    assert not found, found


@pytest.mark.parametrize(
    ("text", "forms"),
    [
        ("a pipe is no\n    regular file", [(1, "is no")]),
        ('first = 1\nmessage = (\n    "the path is "\n    f"no {kind}"\n)', [(3, "is no")]),
        ("x = 1\n# it waits in\n# vain\n", [(2, "in vain")]),
        ("def was_told(line): ...", [(1, "told")]),
        ("Ends. What fails is tried again.", [(1, "What")]),
    ],
)
def test_a_form_is_found_in_its_line(text: str, forms: list[tuple[int, str]]) -> None:
    assert [(one.line, one.form) for one in findings(text)] == forms


@pytest.mark.parametrize(
    "text",
    [
        "there is no file",
        "it is no longer there",
        "a user who sets it",
        "place = file.tell()",
        "# Questions\n\nWhat does it cost? Nothing.",
    ],
)
def test_plain_forms_are_not_found(text: str) -> None:
    assert list(findings(text)) == []
