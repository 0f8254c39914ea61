"""Translates Ray's errors of a call to StageErrors with the stage's name, a cause and a remedy.

an error inside the object                      its own StageError, or one with its message
the process or its node is lost                 ProcessDied, or ProcessRestarts if it is restarted
the cluster has no place for the process        ProcessDied
its answer, or an argument of the call, is lost ProcessDied: it may be alive, and have done the call
an error of the machine or the cluster          StageError with a remedy

``last_error_lines`` adds what the process itself wrote to its log.
"""

from __future__ import annotations

import os
from dataclasses import dataclass

import ray
from ray import exceptions as found

from async_opd.core.errors import ProcessDied, ProcessRestarts, StageError, first_cause
from async_opd.processes.last_lines import error_lines

MAX_SHOWN_CHARACTERS = 500
"""Characters of Ray's message in an error."""
LOGS = "ray_logs of the run directory"
LOG = f"see its log in {LOGS}"
MEMORY = f"{LOG}; running out of memory is the most common cause of a sudden death"
NODE = "see whether the machine is up and reachable, and Ray's logs on it"
VERSIONS = "the same Python, Ray and async_opd on every machine of the cluster"


@dataclass(frozen=True)
class Fault:
    """The cause and the remedy for kinds of Ray's errors.

    ``becomes`` is the error they are translated to. ProcessDied: the state of the process may be
    lost. ProcessRestarts: it is lost, and the caller may repeat the call if the process is
    restarted. A call that only lost its answer must not be repeated: a queue that is alive would
    lease other rows at a second ``get``, and no caller would acknowledge those of the first.
    """

    kinds: tuple[type[BaseException], ...]
    cause: str
    remedy: str
    becomes: type[StageError] = StageError


FAULTS = (
    Fault(
        (found.ActorUnavailableError,),
        "its process died, or cannot be reached",  # Ray does not know yet which
        f"{MEMORY}; run.log names a machine that is lost",
        becomes=ProcessRestarts,
    ),
    Fault((found.RayActorError,), "its process died", MEMORY, becomes=ProcessRestarts),
    Fault((found.WorkerCrashedError,), "its process crashed", MEMORY, becomes=ProcessRestarts),
    Fault((found.AsyncioActorExit,), "its process has exited", LOG, becomes=ProcessRestarts),
    Fault(
        (found.OutOfMemoryError,),
        "Ray killed its process because the machine's memory was nearly full",
        "take fewer or smaller replicas on the machine, or lower queue.max_mib",
        becomes=ProcessRestarts,
    ),
    Fault(
        (found.NodeDiedError, found.LocalRayletDiedError),
        "its machine is lost",
        NODE,
        becomes=ProcessRestarts,
    ),
    Fault(
        (found.OwnerDiedError,),
        "an argument or its answer was lost with the process that had sent it",
        MEMORY,
        becomes=ProcessDied,
    ),
    Fault(
        (found.ObjectLostError, found.PlasmaObjectNotAvailable, found.GetTimeoutError),
        "an argument or its answer is lost",
        NODE,
        becomes=ProcessDied,
    ),
    Fault(
        (found.OutOfDiskError,),
        "the disk to which Ray moves large messages is full",
        "make room on the disk of Ray's directory (RAY_TMPDIR, or the system's temporary one), or "
        "lower queue.max_mib",
    ),
    Fault(
        (found.ObjectStoreFullError,),
        "the shared memory of Ray's large messages is full",
        "give the machine more shared memory (/dev/shm), or lower queue.max_mib",
    ),
    Fault(
        (found.ActorUnschedulableError, found.TaskUnschedulableError),
        "no machine of the cluster can take its process",
        "take fewer replicas, or join a larger cluster; a colocated teacher needs its host's "
        "machine",
        becomes=ProcessDied,
    ),
    Fault(
        (found.ActorPlacementGroupRemoved, found.TaskPlacementGroupRemoved),
        "its placement group was removed",
        "see which other jobs use the cluster",
        becomes=ProcessDied,
    ),
    Fault(
        (found.RuntimeEnvSetupError,),
        "its environment could not be set up",
        f"see runtime_env_setup-*.log in {LOGS}",
    ),
    Fault((found.TaskCancelledError,), "the call was cancelled in its process", LOG),
    Fault(
        (found.AuthenticationError,),
        "the cluster does not accept its token",
        "set RAY_AUTH_MODE=token and the cluster's RAY_AUTH_TOKEN on every machine",
    ),
    Fault((found.RpcError,), "the network between its machine and this one failed", NODE),
    Fault(
        (found.PendingCallsLimitExceeded,),
        "too many calls wait for its process",
        f"it hangs: {LOG}",
    ),
    Fault((found.UnserializableException,), "its error cannot be read here", VERSIONS),
    Fault((found.CrossLanguageError,), "its error came from another language", VERSIONS),
    Fault((found.UserCodeException,), "an error inside of it", LOG),
    Fault((found.RaySystemError,), "Ray itself failed", f"see {LOGS}"),
)
"""The first that fits an error translates it."""


def to_stage_error(name: str, what: str, error: BaseException, restarts: bool) -> StageError:
    """The error of a call ``what`` to the process ``name``.

    ``restarts``: the process is restarted when it dies.
    """
    if isinstance(error, found.RayTaskError):
        return _inside(name, what, error, restarts)
    words = " ".join(str(error).split())[:MAX_SHOWN_CHARACTERS]
    for fault in FAULTS:
        if isinstance(error, fault.kinds):
            cause = f"{fault.cause} during {what}: {words}"
            return _kind(fault, error, restarts)(name, cause, fault.remedy)
    cause = f"{what} failed: {type(error).__name__}: {words}"
    return StageError(name, cause, f"see {LOGS}")


def _kind(fault: Fault, error: BaseException, restarts: bool) -> type[StageError]:
    final = isinstance(error, found.ActorDiedError)  # Ray does not restart it
    if fault.becomes is ProcessRestarts and (final or not restarts):
        return ProcessDied
    return fault.becomes


def _inside(name: str, what: str, error: found.RayTaskError, restarts: bool) -> StageError:
    """Translates an error inside the object. One of Ray's own there is an argument's loss."""
    cause = first_cause(error.cause)
    if isinstance(cause, StageError):
        return cause
    if isinstance(cause, found.RayError) and not isinstance(cause, found.RayTaskError):
        return to_stage_error(name, what, cause, restarts)
    return StageError(name, f"{what} failed: {type(cause).__name__}: {cause}")


def last_error_lines(process: str, lines: int = 15) -> str:
    """The errors at the end of an actor's output, if its log is on this machine.

    ``process`` is Ray's id of it, which its log is named by: a process of another machine may have
    the same pid. Other users of a joined cluster can put links or pipes among Ray's logs:
    ``error_lines`` opens none.
    """
    node = ray._private.worker._global_node
    if node is None or not process:
        return ""
    words: list[str] = []
    for suffix in ("err", "out"):
        for path in sorted(os.scandir(node.get_logs_dir_path()), key=lambda entry: entry.name):
            if path.name.startswith(f"worker-{process}-") and path.name.endswith(f".{suffix}"):
                words += error_lines(path.path, lines)
    return "\n".join(f"      {word}" for word in words[: 4 * lines])
