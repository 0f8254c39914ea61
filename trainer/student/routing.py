"""Routing replay: a mixture's routers take the experts that the engine chose for each token.

    hidden ──router──► probabilities of all experts ──at the engine's choice──► weights, experts
                                                       (else: of the best k)

An engine's rounding differs from the trainer's, and where two experts are nearly as probable they
choose another one: then q is that of another path through the mixture than was sampled. With the
engine's choice it is the same path; weights and gradients are the trainer's own.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch

from async_opd.core.errors import StageError
from trainer.batches.packing import Packed, Row

ROUTERS = ("Qwen3MoeTopKRouter",)
"""Classes of transformers whose forward pass ``_routed`` repeats."""


class Replay:
    """The experts of the row that is computed, for all routers of a student."""

    def __init__(self) -> None:
        self.experts: torch.Tensor | None = None

    def take(self, row: Row, supervised: bool = False) -> None:
        """The row is computed next. It stays so until the next one: recomputed activations need it.

        Where no engine sampled, in rows without tokens to learn from and in ``supervised`` ones,
        the routers choose. StageError if the engine returned no experts for any other row.
        """
        self.experts = row.experts if isinstance(row, Packed) else None
        if isinstance(row, Packed) and row.experts is None and not supervised:
            cause = "its samples have no experts of the engine, which train.routing: replay needs"
            remedy = "set train.routing: own"
            raise StageError("trainer", cause, remedy)


def replay_routing(model: Any) -> Replay:
    """Makes the model's routers take the experts of the ``Replay`` that it returns.

    StageError for a model without routers of a known kind.
    """
    replay = Replay()
    found = 0
    for index, layer in enumerate(model.base_model.layers):
        for module in layer.modules():
            if type(module).__name__ in ROUTERS:
                module.forward = partial(_routed, module, replay, index)
                found += 1
    if not found:
        raise StageError(
            "trainer",
            f"{type(model).__name__} has no router of a kind that can replay: {', '.join(ROUTERS)}",
            "set train.routing: own",
        )
    return replay


def _routed(
    router: Any, replay: Replay, layer: int, hidden: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """``Qwen3MoeTopKRouter.forward`` with given experts: logits, weights [T, k], experts [T, k].

    A token without given experts (-1), such as the last of a response, has the router's own.
    """
    logits = torch.nn.functional.linear(hidden.reshape(-1, router.hidden_dim), router.weight)
    probabilities = torch.nn.functional.softmax(logits, dtype=torch.float, dim=-1)
    weights, experts = torch.topk(probabilities, router.top_k, dim=-1)
    if replay.experts is not None:
        given = replay.experts[:, layer]
        experts = torch.where(given < 0, experts, given)
        weights = probabilities.gather(-1, experts)
    if router.norm_topk_prob:
        weights = weights / weights.sum(dim=-1, keepdim=True)
    return logits, weights.to(logits.dtype), experts
