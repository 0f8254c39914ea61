"""Ray shows a run by names: each stage is a named actor, and so is whoever takes its place."""

from __future__ import annotations

import asyncio
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import ray
from ray.exceptions import ActorAlreadyExistsError
from ray.util import list_named_actors

from async_opd.cluster.actor_factory import ActorFactory
from async_opd.cluster.actor_names import namespace, run_name, when_free
from async_opd.cluster.launch import launch
from async_opd.config.run_config import RunConfig
from async_opd.core.errors import StageTimeout
from tests.cluster.simulated import FACTORIES, config


class Names:
    """Of a Ray that frees a name after it was asked for it so many times."""

    def __init__(self, taken: float) -> None:
        self.taken = taken

    def create(self) -> Any:
        if self.taken:
            self.taken -= 1
            raise ActorAlreadyExistsError("the name is already taken")
        return "an actor"


async def test_a_name_is_waited_for_until_ray_has_freed_it() -> None:
    assert await when_free(Names(2).create, "student/0", 10) == "an actor"


async def test_a_name_that_ray_does_not_free_is_an_error_that_says_whose() -> None:
    with pytest.raises(StageTimeout, match=r"student/0: another actor still has its name .* 0\.1"):
        await when_free(Names(float("inf")).create, "student/0", 0.1)


@pytest.mark.parametrize(
    ("run_dir", "name"),
    [("runs/first", "first"), ("/runs/second/", "second"), (None, "simulated"), (".", "simulated")],
)
def test_a_run_is_called_as_its_directory(run_dir: str | None, name: str) -> None:
    one = config(Path("x")).model_copy(update={"run_dir": run_dir})
    assert run_name(one) == name


def test_two_runs_of_one_name_have_two_namespaces() -> None:
    one = config(Path("runs/first"))
    assert namespace(one) != namespace(one)
    assert namespace(one).startswith("first-")


@dataclass
class Shown:
    """What Ray says about a run, and after a replica was rebuilt."""

    names: set[str]
    kinds: dict[str, str]
    rebuilt: set[str]


KINDS = {
    "queue": "MessageQueue",
    "rollouter": "Rollouter",
    "rollouter/replica/0": "StudentReplica",
    "rollouter/replica/1": "StudentReplica",
    "teacher_scorer": "TeacherScorer",
    "teacher_scorer/t/replica/0": "TeacherReplica",
    "teacher_scorer/t/replica/1": "TeacherReplica",
    "trainer/0": "Trainer",
}


def kinds() -> dict[str, str]:
    """The class that Ray shows for each name of an actor that lives."""
    actors = ray._private.state.actors().values()
    alive = (actor for actor in actors if actor["State"] == "ALIVE")
    return {actor["Name"]: actor["ActorClassName"] for actor in alive}


async def look(run: RunConfig) -> Shown:
    """Starts the run's actors, and one of each kind of replica anew."""
    async with launch(run, device="cpu", eos_ids=(), factories=FACTORIES) as stages:
        names, found = set(list_named_actors()), kinds()
        boxes = ActorFactory(run, "cpu", (), FACTORIES, print)
        stages.singletons.rollouter.replicas[0].student.kill()
        await boxes.student(0, stages.queue, 1)
        return Shown(names, found, set(list_named_actors()))


@pytest.fixture(scope="module")
def shown(tmp_path_factory: pytest.TempPathFactory) -> Shown:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", os.getcwd())  # for the simulated engines
        return asyncio.run(look(config(tmp_path_factory.mktemp("runs") / "first")))


@pytest.mark.engine
class TestNames:
    def test_every_stage_has_a_name_below_the_runs(self, shown: Shown) -> None:
        assert shown.names == {f"first/{path}" for path in KINDS}

    def test_ray_shows_what_each_is(self, shown: Shown) -> None:
        assert shown.kinds == {f"first/{path}": kind for path, kind in KINDS.items()}

    def test_a_replica_that_is_rebuilt_has_the_name_of_the_one_before(self, shown: Shown) -> None:
        assert shown.rebuilt == shown.names
