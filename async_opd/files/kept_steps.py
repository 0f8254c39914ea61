"""``replay/`` of a run directory: the batches of steps, which ``async_opd replay`` computes again.

    ranks ──one file each──► replay/step_N.<rank>-of-<ranks>.safetensors ──► async_opd replay
                                 │ removed when no checkpoint before them is left, and when the
                                 └ run goes on from an earlier step

``trainer.replay.kept_step`` describes the content of a file.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import NamedTuple

from async_opd.files.foreign import ForeignPath, Place, foreign

KEPT = "replay"
_NAME = re.compile(r"step_(\d+)\.(\d+)-of-(\d+)\.safetensors")


class KeptFile(NamedTuple):
    """The file of one of ``ranks`` ranks, of one step."""

    step: int
    ranks: int
    rank: int
    path: ForeignPath


def kept_name(step: int, rank: int, ranks: int) -> str:
    """The name of a rank's file."""
    return f"step_{step}.{rank}-of-{ranks}.safetensors"


def kept_files(run_dir: Place) -> list[KeptFile]:
    """The files by step and rank, without those that are still being written. OSError."""
    kept = (foreign(run_dir) / KEPT).entries()
    found = ((_NAME.fullmatch(path.name), path) for path in kept)
    return sorted(
        KeptFile(int(match[1]), int(match[3]), int(match[2]), path)
        for match, path in found
        if match
    )


def forget_steps(run_dir: Place, gone: Callable[[int], bool]) -> None:
    """Removes the files of steps that are ``gone``. OSError."""
    for file in kept_files(run_dir):
        if gone(file.step):
            file.path.remove()
