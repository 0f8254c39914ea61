"""Learners of several ranks, in processes of this machine."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from benchmarks.local_ranks import in_processes
from trainer.batches.token_weights import TokenWeighting
from trainer.follower import Follower
from trainer.learner import Learner
from trainer.rank import Rank
from trainer.rank_group import RankGroup, RankSpec
from trainer.student.sharding import join_mesh

CPU = torch.device("cpu")


def mesh_of(spec: RankSpec | None, replicate: int = 1) -> Any:
    """The mesh that a rank joins; None of a single one."""
    return None if spec is None else join_mesh(spec, CPU, replicate)


def on_ranks(
    ranks: int,
    rank_of: Callable[[RankSpec | None], Rank],
    work: Callable[[Learner], Any],
    token_weights: TokenWeighting | None = None,
) -> Any:
    """The result of ``work`` with the learner of so many ranks: tensors and plain values."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "found.pt"

        def lead(spec: RankSpec | None, rank_group: RankGroup) -> None:
            torch.save(work(Learner(rank_of(spec), token_weights, rank_group)), file)

        in_processes(ranks, lead, lambda spec: Follower(rank_of(spec)), 120)
        return torch.load(file, weights_only=True)
