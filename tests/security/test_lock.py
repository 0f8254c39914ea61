"""The packages of `make quickstart` are pinned, and by the hashes of its files where it can be."""

from __future__ import annotations

import re
from importlib import metadata
from pathlib import Path

import pytest
from packaging.requirements import Requirement

ROOT = Path(__file__).parents[2]
PINNED = re.compile(r"^([\w.-]+)==(\S+)", re.MULTILINE)


def named(package: str) -> str:
    return re.sub(r"[-_.]+", "-", package).lower()


def pinned(name: str) -> dict[str, str]:
    return {named(package): version for package, version in PINNED.findall(text(name))}


RUN, TESTS = "constraints.lock", "constraints-tests.lock"
LOCKS = pytest.mark.parametrize("lock", [RUN, TESTS])


def text(name: str) -> str:
    return (ROOT / name).read_text(encoding="utf-8")


def test_the_locks_have_the_versions_of_the_constraints() -> None:
    run, tests = pinned(RUN), pinned(TESTS)
    assert run | tests == pinned("constraints.txt")
    assert not run.keys() & tests.keys()
    assert len(run) > 100


def test_a_runs_lock_has_what_a_run_and_its_report_need_on_a_cpu_and_nothing_else() -> None:
    """But for PyTorch, which the Makefile installs from its own index."""
    needed, todo = set[str](), [("async-opd", frozenset({"cpu", "report"}))]
    known = {named(one.metadata["Name"]): one for one in metadata.distributions()}
    seen = set[tuple[str, frozenset[str]]]()
    while todo:
        name, extras = one = todo.pop()
        if one in seen or name not in known:  # torchaudio, say, which is left out
            continue
        seen.add(one)
        needed.add(name)
        for requirement in map(Requirement, known[name].requires or ()):
            wanted = [{"extra": extra} for extra in extras or {""}]
            if requirement.marker is None or any(map(requirement.marker.evaluate, wanted)):
                todo.append((named(requirement.name), frozenset(requirement.extras)))
    assert pinned(RUN).keys() == needed - {"async-opd", "torch"} | {"uv"}


@LOCKS
def test_every_package_of_a_lock_has_a_hash(lock: str) -> None:
    blocks = re.split(r"\n(?=\S)", text(lock).strip())
    assert [block for block in blocks if not re.search(r"--hash=sha256:[0-9a-f]{64}", block)] == []


@LOCKS
def test_a_lock_names_no_place_to_install_from(lock: str) -> None:
    assert "://" not in text(lock)


def test_the_install_asks_for_the_hashes_first() -> None:
    makefile = text("Makefile")
    rule = makefile[makefile.index(".venv/run:") :]
    assert "--require-hashes --requirement" in makefile[: makefile.index(".venv/run:")]
    locked = rule.index("$(LOCKED) constraints.lock")
    assert locked < rule.index('"torch==')
    assert locked < rule.index("$(UNLOCKED)")
