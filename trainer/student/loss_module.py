"""The student and its loss as one module, so that FSDP's hooks surround both.

    Packed ──decoder──► hidden states ──response rows──► LossHead ──► loss, values of each token

To shard it: ``fully_shard`` the decoder's layers, then the LossHead (unless its weight is tied to
the embedding, which the root gathers), then this module. A head is used through its weight, never
called: sharding the ``Linear`` itself would leave the weight scattered.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from async_opd.core.errors import StageError
from async_opd.models.lm_head import LogitShape
from async_opd.models.model_files import ModelError
from trainer.batches.packing import Packed
from trainer.losses import Head, Objective, Tokens, chunked_loss
from trainer.losses.terms import Metrics


@dataclass(frozen=True)
class DecoderAndHead:
    """Logits of a student: those of ``linear`` on the decoder's last states, ``shape`` of them."""

    decoder: Any
    linear: torch.nn.Linear
    shape: LogitShape

    @classmethod
    def of(cls, model: Any) -> DecoderAndHead:
        """StageError for a model whose logits come about in another way, or that has no decoder."""
        name, settings = type(model).__name__, model.config.get_text_config()
        linear = model.get_output_embeddings()
        fault = ""
        if model.base_model is model:
            fault = f"{name} has no decoder of its own (base_model_prefix finds none)"
        elif "chunked_attention" in (getattr(settings, "layer_types", None) or ()):
            fault = f"{name} attends in chunks that begin at places of the packed row"
        elif not isinstance(linear, torch.nn.Linear):
            fault = f"the head of {name} is {type(linear).__name__}, not Linear"
        if fault:
            raise StageError("trainer", fault, "this architecture is not supported")
        try:
            shape = LogitShape.of(settings.to_dict(), name)
        except ModelError as error:
            remedy = "this architecture is not supported as a student"
            raise StageError("trainer", error.message, remedy) from error
        return cls(model.base_model, linear, shape)


class LossHead(torch.nn.Module):
    """The head of the student, and the objective on top of it."""

    def __init__(
        self,
        linear: torch.nn.Linear,
        objective: Objective,
        heads: Mapping[str, Head],
        compute: torch.dtype | None = None,
        shape: LogitShape | None = None,
    ) -> None:
        """``compute``: type of the matrix products; by default that of the tensors."""
        super().__init__()
        self.linear = linear
        self._objective = objective
        self._heads = heads
        self._compute = compute
        self._shape = shape or LogitShape()

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
            shape=self._shape,
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
        """StageError for a model that DecoderAndHead refuses."""
        super().__init__()
        modules = DecoderAndHead.of(model)
        self.decoder = modules.decoder
        self.head = LossHead(modules.linear, objective, heads, compute, modules.shape)
        self.vocabulary = int(modules.linear.weight.shape[0])

    def forward(self, packed: Packed) -> tuple[torch.Tensor, Metrics]:
        """The loss of the micro-batch, which has at least one response token."""
        states = self.decoder(
            input_ids=packed.input_ids, position_ids=packed.position_ids, use_cache=False
        ).last_hidden_state[0]
        loss, metrics = self.head(states[packed.rows], packed.tokens)
        return loss, metrics
