"""A process that starts comes before those that serve: it is to help them.

Processes of a local run start with a niceness of ``STARTING`` and have ``SERVING`` from the end of
their start on: at the same cores a process that starts gets nine times the share of one that
serves.
"""

from __future__ import annotations

import os
from contextlib import suppress

STARTING, SERVING = 5, 15
"""15 is Ray's own default for its workers."""
OF_RAY, YIELDS = "RAY_worker_niceness", "ASYNC_OPD_YIELDS"


def starting_niceness() -> dict[str, str]:
    """The variables of a local cluster; none if the user has chosen a niceness."""
    return {} if OF_RAY in os.environ else {OF_RAY: str(STARTING), YIELDS: "1"}


def yield_to_starting() -> None:
    """Gives all threads of this process and its children the niceness of processes that serve.

    Nothing happens where the variables of ``starting_niceness`` are not set.
    """
    if not os.environ.get(YIELDS):
        return
    import psutil

    own = psutil.Process()
    for process in (own, *own.children(recursive=True)):
        with suppress(psutil.Error):  # it has ended
            for thread in process.threads():
                with suppress(OSError):
                    now = os.getpriority(os.PRIO_PROCESS, thread.id)
                    os.setpriority(os.PRIO_PROCESS, thread.id, max(now, SERVING))
