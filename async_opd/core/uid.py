"""Names of prompts and of their rollouts: a rollout's is ``<prompt's>/<index in its group>``."""

from __future__ import annotations

from typing import NewType

Uid = NewType("Uid", str)
"""Of a prompt or of a rollout. A prompt's may have slashes in it; the last one is a rollout's."""


def rollout_uid(prompt: Uid, member: int) -> Uid:
    """The uid of the rollout that is ``member`` of the prompt's group."""
    return Uid(f"{prompt}/{member}")


def prompt_uid(rollout: Uid) -> Uid:
    """The uid of the rollout's prompt."""
    return Uid(rollout.rpartition("/")[0])


def member_of(rollout: Uid) -> int:
    """The rollout's index in its group. ValueError for a uid that has none."""
    return int(rollout.rpartition("/")[2])
