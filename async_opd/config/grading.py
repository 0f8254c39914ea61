"""The ``grading`` section: bounds of graders, for rewards and for evaluation."""

from __future__ import annotations

from pydantic import Field, PositiveInt

from async_opd.config.section import Section


class GradingConfig(Section):
    """Graders run in processes of their own, so that one that hangs can be ended."""

    timeout_s: float = Field(default=60, gt=0)
    """Longest time for one response. Its grader's process is ended then, and the response is a
    dead letter; in an evaluation it is left out of the mean, and counted."""
    processes: PositiveInt = 4
    """Most grader processes of each student replica (for a reward) and of the driver (for
    evaluation); so many responses are graded at a time. They start as they are needed."""
    memory_gb: float = Field(default=16, gt=0)
    """Most memory of a grader's process, in 1e9 bytes of its own data (``RLIMIT_DATA``: files that
    are mapped do not count). Whatever asks for more in it fails, and the response is a dead letter.
    What a grader starts has the same bound of its own."""
    pass_env: list[str] = Field(default=[])
    """Environment variables that graders get although they hold secrets, such as the key of a
    judge. They inherit all others whose name or value does not tell of a secret."""
    allow_eval: bool = False
    """Allows reasoning-gym tasks whose verifiers evaluate what the model wrote as Python (puzzle24,
    countdown, n_queens and others, see ``grading/verifiers.py``): a response can then run code as
    the user. Without it ``check`` refuses them where they grade, and such a row is a dead
    letter."""
