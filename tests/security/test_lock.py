"""The packages of `make quickstart` are pinned, and by the hashes of its files where it can be."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
PINNED = re.compile(r"^([\w.-]+)==(\S+)", re.MULTILINE)


def pinned(name: str) -> dict[str, str]:
    text = (ROOT / name).read_text(encoding="utf-8")
    return {re.sub(r"[-_.]+", "-", n).lower(): version for n, version in PINNED.findall(text)}


def test_the_lock_has_the_versions_of_the_constraints() -> None:
    assert pinned("constraints.lock") == pinned("constraints.txt")
    assert len(pinned("constraints.txt")) > 100


def test_every_package_of_the_lock_has_a_hash() -> None:
    blocks = re.split(r"\n(?=\S)", (ROOT / "constraints.lock").read_text(encoding="utf-8").strip())
    assert [block for block in blocks if not re.search(r"--hash=sha256:[0-9a-f]{64}", block)] == []


def test_the_lock_names_no_place_to_install_from() -> None:
    assert "://" not in (ROOT / "constraints.lock").read_text(encoding="utf-8")


def test_the_install_asks_for_the_hashes_first() -> None:
    rule = (ROOT / "Makefile").read_text(encoding="utf-8")
    locked = rule.index("--require-hashes --requirement constraints.lock")
    assert locked < rule.index('"torch==')
    assert locked < rule.index("--constraint constraints.txt")
