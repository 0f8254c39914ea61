"""The student and its loss as one module, so that FSDP's hooks surround both.

    Packed ──decoder──► hidden states ──response rows──► LossHead ──► loss, values of each token

To shard it: ``fully_shard`` the decoder's layers, then the LossHead (unless its weight is tied to
the embedding, which the root gathers), then this module. A head is used through its weight, never
called: sharding the ``Linear`` itself would leave the weight scattered.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from async_opd.core.errors import StageError
from trainer.losses import Head, Objective, Tokens, chunked_loss
from trainer.losses.terms import Metrics
from trainer.packing import Packed


class LossHead(torch.nn.Module):
    """The head of the student, and the objective on top of it."""

    def __init__(
        self,
        linear: torch.nn.Linear,
        objective: Objective,
        heads: Mapping[str, Head],
        compute: torch.dtype | None = None,
    ) -> None:
        """``compute``: type of the matrix products; by default that of the tensors."""
        super().__init__()
        self.linear = linear
        self._objective = objective
        self._heads = heads
        self._compute = compute

    def forward(self, hidden: torch.Tensor, tokens: Tokens) -> tuple[torch.Tensor, Metrics]:
        """The loss of hidden rows [N, H]: a scalar with gradient; and metrics [N]."""
        return chunked_loss(
            hidden,
            self.linear.weight,
            self.linear.bias,
            self._objective,
            tokens,
            heads=self._heads,
            compute=self._compute,
        )


class StudentLoss(torch.nn.Module):
    """From a micro-batch to its loss."""

    def __init__(
        self,
        model: Any,
        objective: Objective,
        heads: Mapping[str, Head],
        compute: torch.dtype | None = None,
    ) -> None:
        """StageError for a model whose head is not one matrix."""
        super().__init__()
        linear = model.get_output_embeddings()
        if not isinstance(linear, torch.nn.Linear):
            raise StageError(
                "trainer",
                f"the head of {type(model).__name__} is {type(linear).__name__}, not Linear",
                "this architecture is not supported",
            )
        self.decoder = model.base_model
        self.head = LossHead(linear, objective, heads, compute)
        self.vocabulary = int(linear.weight.shape[0])

    def forward(self, packed: Packed) -> tuple[torch.Tensor, Metrics]:
        """The loss of the micro-batch, which has at least one response token."""
        states = self.decoder(
            input_ids=packed.input_ids, position_ids=packed.position_ids, use_cache=False
        ).last_hidden_state[0]
        loss, metrics = self.head(states[packed.rows], packed.tokens)
        return loss, metrics
