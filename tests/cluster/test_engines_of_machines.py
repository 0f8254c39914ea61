"""A run with real engines over machines: one dies, one joins, one is cut off; then a new head.

    machine-a: head, driver and trainer              machine-b: student     machine-c: teacher
    machine-d: the student, after the loss of b      machine-b again: a's place, after its loss

vLLM on CPUs in network namespaces; gloo takes the weights from machine to machine.
"""

from __future__ import annotations

import re
import time
from collections import defaultdict
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from async_opd.accounting.audit import audit
from async_opd.cluster.session import LOGS
from tests.cluster.test_machines import CUT_S, until_more
from tests.cluster.test_run import BOUND_S, ONE_TEACHER, Run, Running
from tests.world.machines import Machine, Machines

pytestmark = [pytest.mark.engine, pytest.mark.long]

BATCH = 64
STEPS = 40
SYNC_STEPS = 2
OVERRIDES = (
    f"train.batch_size={BATCH}",
    f"train.steps={STEPS}",
    f"async.sync_steps={SYNC_STEPS}",
    "checkpoint.every=2",
    "data.eval=[]",
    "sync={backend: gloo, verify_every: 1}",
    "log.wandb=off",
    "cluster.resources={train: [trains], rollout: [samples], teachers.sort: [scores]}",
    ONE_TEACHER,
)


def start(folder: Path, head: Machine, *others: Machine, resume: bool = False) -> Running:
    """A cluster and the run's driver, beside the trainer; the others: student and teacher."""
    address = head.start_ray(has="trains")
    with ThreadPoolExecutor() as pool:
        list(pool.map(lambda at, has: at.start_ray(head, has), others, ("samples", "scores")))
    more = ("--resume",) if resume else ()
    overrides = (*OVERRIDES, f"cluster.address={address}", *more)
    return Running(folder / "run", *overrides, inside=head.inside)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Run]:
    """The run at its end."""
    folder = tmp_path_factory.mktemp("machines")
    with Machines(folder) as machines:
        a, b, c = (machines.add(name) for name in "abc")
        first = start(folder, a, b, c)
        first.until("everything is up")
        until_more(first, 3)
        b.power_off()
        d = machines.add("d")
        d.start_ray(a, has="samples")
        first.until("machine-d")
        c.cut()
        time.sleep(CUT_S)  # the length of the fault
        c.heal()
        first.until(f"machine-b ({b.address}) is lost")
        first.until("student/0 is rebuilt")
        until_more(first, 2)
        first.until("checkpoint of step")
        for machine in (a, c, d):  # Ray's node does not outlive its head
            machine.power_off()
        first.process.wait(BOUND_S)
        resumed = start(folder, b, d, c, resume=True)
        yield resumed.end()


def test_it_completes_and_every_sample_is_trained_once(run: Run) -> None:
    assert run.ended(0, "completed"), run.output
    found = audit(run.directory)
    assert (len(found.trained), found.lost, found.duplicated) == (STEPS * BATCH, (), ())


def test_all_weights_are_verified_on_the_students_machine(run: Run) -> None:
    verified = run.values("sync/freshness_nats")  # none in a sync without a student
    assert len(verified) >= STEPS / SYNC_STEPS / 2
    assert set(run.values("sync/wrong_weights")) == {0}


def test_student_teacher_and_trainer_are_on_different_machines(run: Run) -> None:
    machines = defaultdict(set)
    for log in (run.directory / LOGS).glob("node-*/*.err"):
        for name in re.findall("this is the log of (.*)", log.read_text()):
            machines[name].add(log.parent.name.rpartition(".")[2])
    found = [machines[name] for name in ("trainer", "student/0", "teacher sort/0")]
    assert found == [{"1", "2"}, {"2", "4"}, {"3"}]
