"""Every error that a call over Ray can end with is one of ours, with a cause and a remedy."""

from __future__ import annotations

import asyncio
import inspect
from typing import Any

import pytest
from ray import exceptions as found

from async_opd.cluster.faults import FAULTS, to_stage_error
from async_opd.cluster.proxies import QueueProxy
from async_opd.cluster.remote import Remote
from async_opd.core.errors import ProcessDied, ProcessRestarts, StageError, StageTimeout

RAYS = [
    kind
    for _, kind in inspect.getmembers(found, inspect.isclass)
    if issubclass(kind, found.RayError)
]
NEVER_RAISED = (
    found.RayError,  # the root: nothing raises it itself
    found.RayTaskError,  # an error inside the object: ``_inside`` reads its cause
    found.ActorAlreadyExistsError,  # of a creation, which waits until the name is free
    found.ActorHandleNotFoundError,  # of a kill
    found.ObjectRefStreamEndOfStreamError,  # of generators
    found.OufOfBandObjectRefSerializationException,  # no reference is ever sent
)
"""Errors that no call can end with, or that only wrap another."""
CALLS = [kind for kind in RAYS if kind not in NEVER_RAISED]


def made(kind: type[BaseException]) -> Any:
    """One of the kind, whatever its own constructor wants."""
    attributes = {"__init__": lambda self: None, "__str__": lambda self: "what Ray says"}
    return type(kind.__name__, (kind,), attributes)()


def test_every_error_of_ray_that_a_call_may_end_with_has_a_cause_and_a_remedy() -> None:
    for kind in CALLS:
        error = to_stage_error("queue", "get", made(kind), restarts=False)
        assert (error.stage, bool(error.remedy)) == ("queue", True), kind
        assert "during get: what Ray says" in error.cause, kind
    kinds = tuple(kind for fault in FAULTS for kind in fault.kinds)
    assert not [kind for kind in NEVER_RAISED if issubclass(kind, kinds)]


DEATHS = ["NodeDiedError", "WorkerCrashedError", "OutOfMemoryError", "ActorUnavailableError"]
LOST = [
    "OwnerDiedError",
    "ObjectLostError",
    "ObjectFetchTimedOutError",
    "PlasmaObjectNotAvailable",
    "GetTimeoutError",
]


@pytest.mark.parametrize("death", DEATHS)
def test_after_the_death_of_a_process_another_one_is_asked_again(death: str) -> None:
    error = made(getattr(found, death))
    assert type(to_stage_error("queue", "get", error, restarts=True)) is ProcessRestarts
    assert type(to_stage_error("student/0", "get", error, restarts=False)) is ProcessDied
    gone = made(found.ActorDiedError)  # for good: Ray does not start it again
    assert type(to_stage_error("queue", "get", gone, restarts=True)) is ProcessDied


@pytest.mark.parametrize("lost", LOST)
async def test_a_lost_message_is_a_death_and_no_lease_is_taken_a_second_time(lost: str) -> None:
    """A second get would lease other rows, and no caller would acknowledge the first lease."""
    for restarts in (True, False):
        error = to_stage_error("queue", "get", made(getattr(found, lost)), restarts)
        assert type(error) is ProcessDied
    handle = Handle(None, made(getattr(found, lost)))
    queue = QueueProxy(Remote("queue", handle, 5, restarts=True))
    with pytest.raises(ProcessDied, match="queue: an argument or its answer"):
        await asyncio.wait_for(queue.get("prompts", 1), 5)
    assert handle.calls == 1


def test_a_full_disk_names_the_disk() -> None:
    error = to_stage_error("queue", "put", made(found.OutOfDiskError), restarts=True)
    assert type(error) is StageError
    assert "RAY_TMPDIR" in error.remedy


def test_an_argument_that_was_lost_is_found_inside_of_a_tasks_error() -> None:
    class Inside(found.RayTaskError):  # type: ignore[misc]
        def __init__(self, cause: BaseException) -> None:
            self.cause = cause

    error = to_stage_error("queue", "put", Inside(made(found.OwnerDiedError)), restarts=False)
    assert isinstance(error, ProcessDied)
    assert "was lost with the process" in error.cause


class Handle:
    """A process whose calls end ``later`` one after the other, all others like the last; None: not.

    One that has an error ``at_once`` is never called.
    """

    def __init__(self, at_once: BaseException | None, *later: BaseException | None) -> None:
        self.at_once, self.later = at_once, later or (None,)
        self.calls = 0

    def __getattr__(self, name: str) -> Any:
        outer = self

        class Method:
            def remote(self, *args: Any) -> Any:
                if outer.at_once is not None:
                    raise outer.at_once
                return outer.ends()

        return Method()

    async def ends(self) -> None:
        self.calls += 1
        if (error := self.later[min(self.calls, len(self.later)) - 1]) is not None:
            raise error
        await asyncio.Event().wait()


@pytest.mark.parametrize("when", ["at once", "later"])
async def test_a_call_is_an_error_of_ours_also_when_its_arguments_have_no_room(when: str) -> None:
    error = made(found.ObjectStoreFullError)
    handle = Handle(error) if when == "at once" else Handle(None, error)
    with pytest.raises(StageError, match="queue: the shared memory of Ray's large messages"):
        await Remote("queue", handle, 5).call("put")


async def test_a_bound_names_its_key_and_rays_own_timeouts_are_not_taken_for_it() -> None:
    with pytest.raises(StageTimeout, match=r"raise timeouts\.request_s"):
        await Remote("queue", Handle(None), 0.01).call("stats")
    with pytest.raises(ProcessDied, match="is lost during get"):
        await Remote("queue", Handle(None, made(found.GetTimeoutError)), 5).call("get")


async def test_a_process_that_dies_at_every_start_is_not_waited_for_without_end() -> None:
    remote = Remote("queue", Handle(None, made(found.ActorUnavailableError)), 5, restarts=True)
    with pytest.raises(StageTimeout, match=r"no process of it started within 0\.01 s"):
        await remote._started(0.01)


UNAVAILABLE = made(found.ActorUnavailableError)


@pytest.fixture
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """A call is repeated without a pause."""
    monkeypatch.setattr("async_opd.cluster.remote.RETRY_S", 0)


@pytest.mark.usefixtures("at_once")
@pytest.mark.parametrize("restarts", [True, False])
async def test_a_process_that_was_unreachable_for_a_moment_is_to_reach_the_queue_all_the_same(
    restarts: bool,
) -> None:
    handle, queue = Handle(None, UNAVAILABLE, None), Remote("queue", None, 5)
    with pytest.raises(StageTimeout, match=r"student/0: a call to queue took longer than 0\.1 s"):
        await Remote("student/0", handle, 5, restarts).reach(queue, 0.1)
    assert handle.calls == 2


@pytest.mark.usefixtures("at_once")
async def test_a_dead_process_is_not_asked_again_whether_it_reaches_the_queue() -> None:
    handle, queue = Handle(None, UNAVAILABLE, made(found.ActorDiedError)), Remote("queue", None, 5)
    with pytest.raises(ProcessDied, match="student/0: its process died"):
        await Remote("student/0", handle, 5).reach(queue, 60)
    assert handle.calls == 2


@pytest.mark.usefixtures("at_once")
@pytest.mark.parametrize("later", [None, UNAVAILABLE])
async def test_a_process_is_asked_for_an_answer_to_another_one_for_no_longer_than_the_bound(
    later: BaseException | None,
) -> None:
    with pytest.raises(StageTimeout, match=r"queue: a call took longer than 0\.1 s"):
        await Remote("queue", Handle(None, later), 5, restarts=True).reached(0.1)
