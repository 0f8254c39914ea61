"""The names of a run's actors. Those that Ray shows are in tests/chaos/test_rollouter.py."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from ray.exceptions import ActorAlreadyExistsError

from async_opd.cluster import remote
from async_opd.cluster.actor_names import namespace, run_name
from async_opd.cluster.remote import when_free
from async_opd.core.errors import StageError, StageTimeout
from tests.cluster.simulated import config


class Names:
    """Of a Ray that frees a name after it was asked for it so many times."""

    def __init__(self, taken: float) -> None:
        self.taken = taken

    def create(self) -> Any:
        if self.taken:
            self.taken -= 1
            raise ActorAlreadyExistsError("the name is already taken")
        return "an actor"


async def test_a_name_is_waited_for_until_ray_has_freed_it_or_the_bound_is_over() -> None:
    assert await when_free(Names(2).create, "student/0", 10) == "an actor"
    with pytest.raises(StageTimeout, match=r"student/0: another actor still has its name .* 0\.1"):
        await when_free(Names(float("inf")).create, "student/0", 0.1)


async def test_nothing_starts_until_a_silent_head_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ray would wait for a lost head without end, and the event loop with it."""
    silences = iter([True, True])

    async def answer() -> None:
        if next(silences, False):
            raise StageError("cluster", "Ray's head does not answer")

    monkeypatch.setattr(remote, "nodes", answer)
    assert await when_free(lambda: next(silences, "an actor"), "student/0", 10) == "an actor"


@pytest.mark.parametrize(
    ("run_dir", "name"),
    [("runs/first", "first"), ("/runs/second/", "second"), (None, "simulated"), (".", "simulated")],
)
def test_a_run_has_the_name_of_its_directory_and_a_namespace(
    run_dir: str | None, name: str
) -> None:
    one = config(Path("x")).model_copy(update={"run_dir": run_dir})
    assert run_name(one) == name
    assert namespace(one) != namespace(one)
    assert namespace(one).startswith(f"{name}-")
