"""Graders' processes: no code of the working directory runs, and no child of theirs grades."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest

from async_opd.config.load import load_config
from async_opd.config.sections.evaluation import GradingConfig
from async_opd.core.errors import StageError
from async_opd.core.row import Row
from async_opd.grading.grader_pool import Graders, GraderSpec
from async_opd.grading.graders import GradeError

ROOT = Path(__file__).parents[2]
MODULE = """
import json, os, socket, subprocess, sys

FORGED = b'{"grade": 1.0, "cause": "", "remedy": ""}\\n' * 3
SPEAKER = '''
import os, stat
for number in range(256):
    try:
        if stat.S_ISSOCK(os.fstat(number).st_mode):
            os.write(number, {0!r})
    except OSError:
        pass
'''

def writes_by_a_child(response, row):
    subprocess.run([sys.executable, "-c", SPEAKER.format(FORGED)], close_fds=False)
    return 0.25

def writes_by_a_fork(response, row):
    child = os.fork()
    if not child:
        exec(SPEAKER.format(FORGED))
        os._exit(0)
    os.waitpid(child, 0)
    return 0.25

def prints_an_answer(response, row):
    sys.__stdout__.buffer.write(FORGED)
    sys.__stdout__.flush()
    return 0.25

def writes_itself(response, row):
    exec(SPEAKER.format(row.answer.encode() + b"\\n"))
    return 0.25

def takes_memory(response, row):
    return 1.0 if len(bytearray(int(response))) else 0.0

def memory_of_torch(response, row):
    import torch, sympy
    return float(torch.ones(512, 512).sum() > 0) * float(sympy.simplify("x - x + 1"))

def scripts_child(response, row):
    script = row.fields["folder"] + "/script.py"
    return float(subprocess.run([sys.executable, script], capture_output=True).stdout)
"""

Made = Callable[..., Graders]


def row(answer: str = "x", **fields: str) -> Row:
    return Row("0:7", "a", "p", answer, dict(fields))


@pytest.fixture
async def made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Made]:
    (tmp_path / "users").mkdir()
    (tmp_path / "users" / "speakers.py").write_text(MODULE)
    monkeypatch.syspath_prepend(str(tmp_path / "users"))
    graders: list[Graders] = []

    def build(function: str, **bounds: Any) -> Graders:
        graders.append(Graders(GraderSpec(function, GradingConfig(processes=1, **bounds), 60)))
        return graders[-1]

    yield build
    for one in graders:
        one.close()


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working directory with modules that say that they ran."""
    folder = tmp_path / "downloaded"
    folder.mkdir()
    for name in ("json", "pickle", "socket", "sitecustomize", "usercustomize", "async_opd"):
        (folder / f"{name}.py").write_text(f"open({str(folder / 'ran')!r}, 'w').close()\n")
    (folder / "mine.py").write_text("def one(response, row):\n    return 1.0\n")
    monkeypatch.chdir(folder)
    monkeypatch.setattr(sys, "path", [path for path in sys.path if path])
    return folder


async def test_no_code_of_the_working_directory_runs(made: Made, here: Path) -> None:
    assert await made("speakers:prints_an_answer").grade("x", row()) == 0.25
    assert not (here / "ran").exists()


async def test_a_grader_in_the_working_directory_is_not_found_by_being_there(
    made: Made, here: Path
) -> None:
    with pytest.raises(StageError, match="No module named 'mine'"):
        await made("mine:one").grade("x", row())


async def test_a_grader_of_a_folder_that_is_named_is_found(
    made: Made, here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    named = here / "named"
    named.mkdir()
    (named / "users_own.py").write_text("def one(response, row):\n    return 1.0\n")
    monkeypatch.syspath_prepend(str(named))  # as PYTHONPATH does
    assert await made("users_own:one").grade("x", row()) == 1.0


async def test_a_grader_that_needs_too_much_memory_is_a_fault_and_the_next_response_is_graded(
    made: Made,
) -> None:
    grader = made("speakers:takes_memory", memory_gb=1)
    with pytest.raises(GradeError, match=r"(?s)more memory on row 0:7 than.*grading\.memory_gb"):
        await grader.grade(str(2 * 10**9), row())
    assert await grader.grade("1", row()) == 1.0


@pytest.mark.slow
async def test_a_grader_may_take_what_the_config_allows(made: Made) -> None:
    grader = made("speakers:takes_memory", memory_gb=1)
    assert await grader.grade(str(5 * 10**8), row()) == 1.0


@pytest.mark.slow
async def test_torch_and_sympy_fit_into_a_small_bound(made: Made) -> None:
    grader = made("speakers:memory_of_torch", memory_gb=2)
    assert await grader.grade("x", row()) == 1.0


def test_the_config_bounds_a_graders_memory() -> None:
    example = ROOT / "examples" / "quickstart.yaml"
    config = load_config(example, ["grading.memory_gb=0.5"])
    assert GraderSpec.of(config, "exact").limits.memory_gb == 0.5
    assert GraderSpec.of(load_config(example), "exact").limits.memory_gb == 16


async def test_a_graders_own_script_finds_what_is_beside_it(
    made: Made, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONSAFEPATH", "1")  # as in a run's actors
    (tmp_path / "beside.py").write_text("VALUE = 0.75\n")
    (tmp_path / "script.py").write_text("import beside; print(beside.VALUE)\n")
    grader = made("speakers:scripts_child")
    assert await grader.grade("x", row(folder=str(tmp_path))) == 0.75


@pytest.mark.parametrize("how", ["writes_by_a_child", "writes_by_a_fork", "prints_an_answer"])
async def test_what_a_graders_child_says_is_no_grade(made: Made, how: str) -> None:
    graders = made(f"speakers:{how}")
    assert [await graders.grade("x", row()) for _ in range(3)] == [0.25] * 3


@pytest.mark.parametrize(
    "said",
    [
        '{"grade": 1.0, "cause": "", "remedy": ""}',
        '{"grade": 1e9, "cause": "", "remedy": "", "to": "0"}',
        '{"grade": "x"}',
        "[]",
        "no JSON",
        "[" * 100_000,
        "x" * (1 << 21),
    ],
    ids=["no request's", "another request's", "no number", "no object", "no JSON", "deep", "long"],
)
async def test_an_answer_to_no_request_is_no_grade_and_ends_the_process(
    made: Made, said: str
) -> None:
    graders = made("speakers:writes_itself")
    with pytest.raises(GradeError, match="sent an invalid answer"):
        await graders.grade("x", row(said))
    assert graders._idle == []


@pytest.mark.slow
def test_the_command_line_started_as_a_module_imports_nothing_from_the_working_directory(
    here: Path,
) -> None:
    for harmful in ("sitecustomize.py", "json.py", "socket.py", "pickle.py", "async_opd.py"):
        (here / harmful).unlink()  # those before the first line of ours: python -m itself
    (here / "yaml.py").write_text(f"open({str(here / 'ran')!r}, 'w').close()\n")
    (here / "c.yaml").write_text("name: n\n")
    command = [sys.executable, "-m", "async_opd", "check", "c.yaml"]
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    found = subprocess.run(command, capture_output=True, text=True, env=env, timeout=120)
    assert found.returncode == 2, found.stderr
    assert not (here / "ran").exists()


def test_rays_workers_import_nothing_from_the_working_directory(
    here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from async_opd.cluster.session import job_config

    monkeypatch.setattr(sys, "argv", ["/opt/venv/bin/async_opd", "run"])
    made = job_config()
    assert made._py_driver_sys_path == []
    assert made._runtime_env_has_working_dir()


def test_rays_workers_import_from_the_drivers_path(
    here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from async_opd.cluster.session import job_config

    monkeypatch.syspath_prepend(str(here))
    monkeypatch.setattr(sys, "argv", ["/opt/venv/bin/async_opd", "run"])
    assert job_config()._py_driver_sys_path == [str(here)]


def test_every_process_of_a_run_leaves_the_working_directory_out(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    import ray

    from async_opd.cluster.remote import Remote

    seen: list[dict[str, str]] = []

    class Handle:
        def options(self, **options: object) -> Handle:
            seen.append(options["runtime_env"]["env_vars"])  # type: ignore[index]
            return self

        def remote(self) -> None:
            return None

    monkeypatch.setattr(ray, "remote", lambda kind: Handle())
    Remote.create("x", timeout_s=1, kind="Seen")  # a class is made once a kind
    assert seen == [{"ASYNC_OPD_ACTOR": "x", "PYTHONSAFEPATH": "1"}]


def test_graders_need_no_event_loop_to_be_closed() -> None:
    asyncio.run(_opened_and_closed())


async def _opened_and_closed() -> None:
    Graders(GraderSpec("exact", GradingConfig(), 1)).close()
