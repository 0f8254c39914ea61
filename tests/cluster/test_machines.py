"""A run over three machines of which one is lost, one joins and one is cut off; a new head.

    machine-a: head and driver     machine-b, machine-c: nodes     machine-d: joins later

Real actors on a real Ray cluster with a token, over network namespaces; engines and learner only
take time.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from async_opd.accounting.audit import audit
from async_opd.checkpoint.store import Checkpoints
from tests.cluster.simulated import HURRY
from tests.cluster.test_run import BOUND_S, Running
from tests.world.machines import Machine, Machines

pytestmark = [pytest.mark.engine, pytest.mark.long]

BATCH = 16
STEPS = 200
SIMULATED = (
    f"train.batch_size={BATCH}",
    f"train.steps={STEPS}",
    "data.eval=[]",
    "sync={verify_every: 0}",
    "supervision.timeout_s=20",
    "rollout.n=1",
    "rollout.replicas=2",
    "teachers={sort: {model: quickstart/models/teacher-sort, sources: [sort, reverse], "
    "replicas: 2}}",
    "plan.train.overhead_s=0.5",
)
"""A step takes half a second, until there is the file ``HURRY``."""
CUT_S = 20


@pytest.fixture
def machines(tmp_path: Path) -> Iterator[Machines]:
    with Machines(tmp_path) as made:
        yield made


def start(at: Machine, address: str, run_dir: Path, *overrides: str) -> Running:
    """A run whose driver is on a machine."""
    return Running(
        run_dir,
        *SIMULATED,
        f"cluster.address={address}",
        *overrides,
        program=("tests.cluster.simulated",),
        inside=at.inside,
    )


def steps(running: Running) -> int:
    """Rows of steps until now."""
    rows = running.directory / "metrics.jsonl"
    return rows.read_text().count('"loss/total"') if rows.exists() else 0


def until_more(running: Running, more: int) -> None:
    """Waits until so many more steps are in its record."""
    wanted, deadline = steps(running) + more, time.monotonic() + BOUND_S
    while steps(running) < wanted:
        assert running.process.poll() is None, running.read()
        assert time.monotonic() < deadline, running.read()
        time.sleep(0.2)


def test_a_run_survives_a_machine_that_dies_one_that_joins_and_one_that_is_cut_off(
    machines: Machines, tmp_path: Path
) -> None:
    a, b, c = (machines.add(name) for name in "abc")
    address = a.start_ray()
    for node in (b, c):
        node.start_ray(a)
    running = start(a, address, tmp_path / "run")
    running.until("everything is up")
    until_more(running, 5)
    c.power_off()
    running.until(f"machine-c ({c.address}) is lost")
    machines.add("d").start_ray(a)
    running.until("machine-d")
    until_more(running, 5)
    b.cut()
    time.sleep(CUT_S)  # the length of the fault
    b.heal()
    (running.directory / HURRY).touch()
    run = running.end()
    assert run.ended(0, "completed"), run.output
    found = audit(run.directory)
    assert (len(found.trained), found.lost, found.duplicated) == (STEPS * BATCH, (), ())


def test_a_run_whose_head_and_driver_die_is_resumed_on_another_machine_by_a_new_head(
    machines: Machines, tmp_path: Path
) -> None:
    a, b = (machines.add(name) for name in "ab")
    address = a.start_ray()
    b.start_ray(a)
    running = start(a, address, tmp_path / "run")
    running.until("checkpoint of step")
    for machine in (a, b):  # Ray's node does not outlive its head
        machine.power_off()
    running.process.wait(BOUND_S)
    last = Checkpoints(tmp_path / "run" / "checkpoints", 2).steps()[-1]
    c = machines.add("c")
    address = c.start_ray()
    b.start_ray(c)
    (tmp_path / "run" / HURRY).touch()
    resumed = start(b, address, tmp_path / "run", "--resume")
    run = resumed.end()
    assert run.ended(0, "completed"), run.output
    assert f"going on after step {last}" in run.output
    found = audit(run.directory)
    assert (len(found.trained), found.lost, found.duplicated) == (STEPS * BATCH, (), ())
