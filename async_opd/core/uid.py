"""Uids of prompts and of rollouts; a rollout's is ``<prompt's uid>/<index in its group>``."""

from __future__ import annotations

from typing import NewType
from zlib import crc32

Uid = NewType("Uid", str)
"""Names a prompt or a rollout. A prompt's may contain slashes; a rollout's last slash separates."""


def rollout_uid(prompt: Uid, member: int) -> Uid:
    """The uid of the rollout that is ``member`` of the prompt's group."""
    return Uid(f"{prompt}/{member}")


def prompt_uid(rollout: Uid) -> Uid:
    """The uid of the rollout's prompt."""
    return Uid(rollout.rpartition("/")[0])


def turn_uid(rollout: Uid, turn: int) -> Uid:
    """Names a turn of a rollout, for its seed; the first one has the rollout's."""
    return Uid(f"{rollout}/{turn}") if turn else rollout


TRACED = 100


def is_traced(rollout: Uid | str) -> bool:
    """Whether the trace follows the rollout: one in ``TRACED``, by its uid."""
    return crc32(rollout.encode()) % TRACED == 0


def member_of(rollout: Uid) -> int:
    """The rollout's index in its group. ValueError for a uid that has none."""
    return int(rollout.rpartition("/")[2])
