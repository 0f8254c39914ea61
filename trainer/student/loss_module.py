"""The student and its loss as one module, so that FSDP's hooks surround both.

    Packed ──decoder──► hidden states ──response rows──► LossHead ──► loss, values of each token

To shard it: ``fully_shard`` the decoder's layers, then the LossHead (unless its weight is tied to
the embedding, which the root gathers), then this module. The loss reads the head's weight and never
calls the ``Linear``, whose own FSDP hooks would therefore never gather the weight.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from async_opd.core.errors import StageError
from async_opd.models.lm_head import LogitShape
from async_opd.models.model_files import ModelError
from trainer.batches.packing import Packed, Row
from trainer.losses.base import Tokens
from trainer.losses.chunked import Head, Sum, chunked_loss, head_logits
from trainer.losses.estimators import CrossEntropy
from trainer.losses.objective import Objective
from trainer.losses.terms import Metrics, Sampled
from trainer.student.attention import row_lengths
from trainer.student.routing import replay_routing
from trainer.vision.images import has_dimensions
from trainer.vision.parts import attention_of

SUPERVISED = Objective(Sampled(CrossEntropy()))
"""The objective of a cold start's steps."""
UNSUPPORTED = "this architecture is not supported: choose another student.model"


@dataclass(frozen=True)
class DecoderAndHead:
    """Parts of a student: logits are ``linear`` of the decoder's last states, then ``shape``."""

    decoder: Any
    linear: torch.nn.Linear
    shape: LogitShape

    @classmethod
    def of(cls, model: Any) -> DecoderAndHead:
        """StageError for a model without a decoder, or whose logits are computed in another way."""
        name, settings = type(model).__name__, model.config.get_text_config()
        linear = model.get_output_embeddings()
        fault = ""
        if model.base_model is model:
            fault = f"{name} has no separate decoder (base_model_prefix finds none)"
        elif "chunked_attention" in (getattr(settings, "layer_types", None) or ()):
            fault = f"{name} attends in chunks, which would begin at positions of the packed row"
        elif not isinstance(linear, torch.nn.Linear):
            fault = f"the head of {name} is {type(linear).__name__}, not Linear"
        if fault:
            raise StageError("trainer", fault, UNSUPPORTED)
        try:
            shape = LogitShape.of(settings.to_dict(), name)
        except ModelError as error:
            raise StageError("trainer", error.message, UNSUPPORTED) from error
        return cls(model.base_model, linear, shape)


class LossHead(torch.nn.Module):
    """The head of the student, and the loss of its logits."""

    def __init__(
        self,
        linear: torch.nn.Linear,
        loss: Callable[..., tuple[torch.Tensor, Metrics]],
        logits: Callable[..., torch.Tensor],
        objective: Objective,
    ) -> None:
        """Both take hidden rows, the head's weight and bias; ``loss`` takes ``tokens`` too."""
        super().__init__()
        self.linear = linear
        self._loss = loss
        self._logits = logits
        self._objective = objective

    def forward(
        self, hidden: torch.Tensor, tokens: Tokens | None, supervised: bool = False
    ) -> tuple[torch.Tensor, Metrics]:
        """The loss of hidden rows [N, H] (a scalar with gradient), and metrics [N].

        It is the run's objective, or the tokens' cross entropy (``supervised``). Without tokens
        the logits [N, V] of the rows, float32 without gradient, and no metrics.
        """
        if tokens is None:
            return self._logits(hidden, self.linear.weight, self.linear.bias), {}
        objective = SUPERVISED if supervised else self._objective
        weight, bias = self.linear.weight, self.linear.bias
        return self._loss(hidden, weight, bias, tokens=tokens, objective=objective)


class StudentLoss(torch.nn.Module):
    """The loss of a micro-batch: decoder, response rows, head, objective."""

    def __init__(
        self,
        model: Any,
        objective: Objective,
        heads: Mapping[str, Head],
        compute: torch.dtype | None = None,
        over_ranks: Sum | None = None,
        replays: bool = False,
    ) -> None:
        """``compute``: type of the head's matrix products; StageError as DecoderAndHead.of.

        ``over_ranks`` where ranks share each row, of which a micro-batch is one rank's share.
        ``replays``: routers take the engines' experts (``trainer.student.routing``).
        """
        super().__init__()
        modules = DecoderAndHead.of(model)
        self.decoder = modules.decoder
        shared: dict[str, Any] = {"compute": compute, "shape": modules.shape}
        loss = partial(chunked_loss, heads=heads, over_ranks=over_ranks, **shared)
        self.head = LossHead(modules.linear, loss, partial(head_logits, **shared), objective)
        self.vocabulary = int(modules.linear.weight.shape[0])
        self._replay = replay_routing(model) if replays else None

    def forward(self, row: Row, supervised: bool = False) -> tuple[torch.Tensor, Metrics]:
        """The loss of a micro-batch with at least one response token, or of a rank's share of it.

        Of a row without tokens to learn from, the logits of all its tokens (see LossHead).
        """
        if self._replay is not None:
            self._replay.take(row, supervised)
        lengths = row_lengths(attention_of(self.decoder), row)
        states = decoded_states(self.decoder, row, lengths)
        if not isinstance(row, Packed):
            return self.head(states, None)  # type: ignore[no-any-return]
        return self.head(states[row.rows], row.tokens, supervised)  # type: ignore[no-any-return]


def decoded_states(decoder: Any, row: Row, lengths: Mapping[str, Any]) -> torch.Tensor:
    """The decoder's last states [T, H] of a row; ``lengths``: see ``attention.row_lengths``."""
    given: dict[str, Any] = {"input_ids": row.input_ids, "position_ids": positions_of(decoder, row)}
    unused: torch.Tensor | None = None
    images = row.images
    if images is not None:
        features = decoder.get_image_features(**images.inputs, return_dict=True)
        if images.order:
            given["mm_encoder_outputs"] = {"image": _in_order(features, images.order)}
        else:
            unused = sum(one.sum() for one in _tensors(features))  # type: ignore[assignment]
    states: torch.Tensor = decoder(**given, use_cache=False, **lengths).last_hidden_state[0]
    if unused is not None and unused.requires_grad:
        states = states + 0 * unused.to(states.dtype)
    return states


def positions_of(decoder: Any, row: Row) -> torch.Tensor:
    """``position_ids`` of a row as the decoder takes them: [1, T], or [4, 1, T] with text's first.

    With three dimensions alone transformers would not find where sequences begin.
    """
    text, images = row.position_ids, row.images
    if not has_dimensions(decoder):
        return text
    if images is None or images.positions is None:
        return text[None].expand(4, -1, -1)
    return torch.cat([text[None], images.positions])


def _in_order(features: Any, order: Sequence[int]) -> Any:
    """The tower's results with one entry for each image that the row shows."""
    features.pooler_output = [features.pooler_output[index] for index in order]
    stacked = getattr(features, "deepstack_features", None)
    if stacked is not None:
        features.deepstack_features = [[one[index] for index in order] for one in stacked]
    return features


def _tensors(features: Any) -> list[torch.Tensor]:
    stacked = getattr(features, "deepstack_features", None) or ()
    return [*features.pooler_output, *(tensor for layer in stacked for tensor in layer)]
