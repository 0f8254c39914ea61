"""What Ray raises when a call fails, as our errors: with the stage's name, a cause and a remedy.

an error inside the object          its own StageError, or one with its words
the process or its node is lost                 ProcessDied, or ProcessRestarts where another comes
an answer of it, or an argument, is lost        ProcessDied: it may live, and have done the call
the machine or the cluster is at fault          StageError that says what to see to
"""

from __future__ import annotations

from dataclasses import dataclass

from ray import exceptions as found

from async_opd.core.errors import ProcessDied, ProcessRestarts, StageError, first_cause

MAX_SHOWN_CHARACTERS = 500
"""Characters of Ray's own words."""

LOGS = "ray_logs of the run directory (of a cluster that was joined: in Ray's session directory)"
LOG = f"see its log in {LOGS}"
MEMORY = f"{LOG}; running out of memory is the most common cause of a sudden death"
NODE = "see whether the machine is up and reachable, and Ray's logs on it"
VERSIONS = "the same Python, Ray and async_opd on every machine of the cluster"


@dataclass(frozen=True)
class Fault:
    """What kinds of Ray's errors mean.

    ``ours`` is the error that they become. ProcessDied: what the process did may be lost.
    ProcessRestarts: so it is, and the call may be made again where another process comes. A queue
    that lives would lend other rows at a second ``get``, and those of the first would be nobody's.
    """

    kinds: tuple[type[BaseException], ...]
    cause: str
    remedy: str
    ours: type[StageError] = StageError


FAULTS = (
    Fault((found.RayActorError,), "its process died", MEMORY, ours=ProcessRestarts),
    Fault((found.WorkerCrashedError,), "its process crashed", MEMORY, ours=ProcessRestarts),
    Fault((found.AsyncioActorExit,), "its process has left", LOG, ours=ProcessRestarts),
    Fault(
        (found.OutOfMemoryError,),
        "its process was ended because the machine's memory was nearly full",
        "take fewer or smaller replicas on the machine, or lower queue.max_mib",
        ours=ProcessRestarts,
    ),
    Fault(
        (found.NodeDiedError, found.LocalRayletDiedError),
        "its machine is lost",
        NODE,
        ours=ProcessRestarts,
    ),
    Fault(
        (found.OwnerDiedError,),
        "what it was sent, or answered, died with the process that it came from",
        MEMORY,
        ours=ProcessDied,
    ),
    Fault(
        (found.ObjectLostError, found.PlasmaObjectNotAvailable, found.GetTimeoutError),
        "what it was sent, or answered, is lost",
        NODE,
        ours=ProcessDied,
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
    ),
    Fault(
        (found.ActorPlacementGroupRemoved, found.TaskPlacementGroupRemoved),
        "its place in the cluster was taken away",
        "see who else works in the cluster",
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
"""In this order: the first that fits says what it was."""

NEVER_RAISED = (
    found.RayError,  # the root: nothing raises it itself
    found.RayTaskError,  # an error inside the object: what it was speaks for itself
    found.ActorAlreadyExistsError,  # of a creation, which waits for the name
    found.ActorHandleNotFoundError,  # of a kill
    found.ObjectRefStreamEndOfStreamError,  # of generators
    found.OufOfBandObjectRefSerializationException,  # no reference is ever sent
)
"""What no call of ours can end with, or what is no fault of its own."""


def to_stage_error(name: str, what: str, error: BaseException, restarts: bool) -> StageError:
    """The error of a call ``what`` to the process ``name``.

    ``restarts``: another process takes the place of one that dies.
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
    final = isinstance(error, found.ActorDiedError)  # Ray starts no other
    if fault.ours is ProcessRestarts and (final or not restarts):
        return ProcessDied
    return fault.ours


def _inside(name: str, what: str, error: found.RayTaskError, restarts: bool) -> StageError:
    """An error of the object; of Ray's own, what it means: an argument that was lost."""
    cause = first_cause(error.cause)
    if isinstance(cause, StageError):
        return cause
    if isinstance(cause, found.RayError) and not isinstance(cause, found.RayTaskError):
        return to_stage_error(name, what, cause, restarts)
    return StageError(name, f"{what} failed: {type(cause).__name__}: {cause}")
