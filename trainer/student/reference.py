"""The student's log-probabilities of held rows, and how much rounding changes them.

    rows ──Row──► logits of the student ──► log-probabilities
                  the same, every module's result times 1 ± JITTER ──► noise per relative error

The replicas' log-probabilities are compared with these (``async_opd.weight_sync.freshness``).

Of a VLM student one held row has an image, so that its tower is compared, too:

    held_rows ──expand──► one packed row ──► the trainer's log-probabilities
    (short, with one placeholder)  ──► each replica's engine expands it by itself
"""

from __future__ import annotations

import hashlib
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from async_opd.core.row import Media
from async_opd.core.sequence import Float32, Int32
from async_opd.models.rope import Positions, max_model_len
from async_opd.weight_sync.layout import GOLDEN, HeldRow, Reference, by_kind, held_ids, held_rows
from trainer.batches.packing import Row
from trainer.layers import CompiledLayers
from trainer.student.quantization import SentMatrices
from trainer.vision.images import Sight

if TYPE_CHECKING:
    from async_opd.config.run_config import RunConfig

JITTER = 2.0**-6
"""Relative error for measuring the noise: above the rounding of bfloat16, which would swallow a
smaller one, and small enough that log-probabilities change in proportion."""
ROUNDING = {torch.float32: 2.0**-24, torch.bfloat16: 2.0**-8}
"""Largest relative error of one rounding, by dtype."""
BEFORE, BEHIND = 3, 32
"""Tokens before the image, and behind it, which are compared."""
WIDTH, HEIGHT = 96, 64
"""Pixels of the image; they differ, so that an engine that exchanges them is found out."""


def rows_to_compare(config: RunConfig, model: Any, sight: Sight | None) -> tuple[HeldRow, ...]:
    """The held rows of ``weight_sync.freshness`` for the student and its engines."""
    settings = model.config.get_text_config().to_dict()
    longest = Positions.of(settings, max_model_len(config.rollout.engine)).longest
    room = sys.maxsize if longest is None else longest - 1  # an engine samples one token more
    return rows_to_hold(int(settings["vocab_size"]), room, sight)


def rows_to_hold(vocabulary: int, longest: int, sight: Sight | None) -> tuple[HeldRow, ...]:
    """The held rows for a student and its engines, of at most ``longest`` tokens.

    Without a row with an image where not even that many tokens have room for it.
    """
    if sight is None:
        return held_rows(vocabulary, longest)
    others = sight.unsampled_ids
    rows = held_rows(vocabulary, longest, others)
    ids = held_ids(BEFORE + BEHIND, vocabulary, others)
    short = np.insert(ids, BEFORE, sight.placeholder_id).astype(np.int32)
    media, encoded = picture()
    shown = HeldRow(short, BEHIND, (media,), encoded)
    fits = len(sight.expanded(shown.ids, [encoded])) <= longest
    return (*rows, shown) if fits else rows


def packed(rows: Sequence[HeldRow], sight: Sight | None) -> Row:
    """One row of all of them, with their images, on the CPU. StageError as Sight.of."""
    rollouts = [row.rollout(_prompt_of(row, sight)) for row in rows]
    ids = [one.token_ids for one in rollouts]
    made = Row.of(ids, [np.arange(len(one)) for one in ids])
    encoded = {sha256: each for row in rows for sha256, each in row.images.items()}
    if sight is None or not encoded:
        return made
    return replace(made, images=sight.of(rollouts, encoded))


def picture() -> tuple[Media, bytes]:
    """The image, encoded as PNG: waves of another direction and length in each color."""
    from io import BytesIO

    from PIL import Image

    y, x = np.mgrid[:HEIGHT, :WIDTH]
    waves = [np.sin(GOLDEN * (x * (1 + color) / 4 + y * (3 - color) / 5)) for color in range(3)]
    pixels = (127.5 * (1 + np.stack(waves, -1))).astype(np.uint8)
    made = BytesIO()
    Image.fromarray(pixels).save(made, "PNG")
    encoded = made.getvalue()
    return Media(hashlib.sha256(encoded).hexdigest(), len(encoded), WIDTH, HEIGHT), encoded


def _prompt_of(row: HeldRow, sight: Sight | None) -> Int32 | None:
    """The expanded prompt of a row with an image."""
    if sight is None or not row.media:
        return None
    return sight.expanded(row.ids[: -row.compared], [row.encoded])


@dataclass(frozen=True)
class Jitter:
    """Multiplies tensors by 1 + e, with e uniform within ±JITTER from a separate generator."""

    generator: torch.Generator

    @classmethod
    def of(cls, device: torch.device) -> Jitter:
        """The same sequence of errors at each call: the random state of training is untouched."""
        return cls(torch.Generator(device).manual_seed(0))

    def __call__(self, tensor: torch.Tensor) -> torch.Tensor:
        """A changed copy, in the tensor's dtype."""
        error = torch.empty(tensor.shape, device=tensor.device)
        error.uniform_(-JITTER, JITTER, generator=self.generator)
        return (tensor * (1 + error)).to(tensor.dtype)

    def hook(self, module: torch.nn.Module, args: Any, output: Any) -> Any:
        """A forward hook: changes a result that is one floating-point tensor."""
        if isinstance(output, torch.Tensor) and output.is_floating_point():
            return self(output)
        return None

    @contextmanager
    def within(self, modules: Iterator[torch.nn.Module]) -> Iterator[None]:
        """Changes the results of all modules without parts during the block."""
        leaves = [module for module in modules if not any(module.children())]
        handles = [module.register_forward_hook(self.hook) for module in leaves]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()


def reference_of(
    student: torch.nn.Module,
    logits_of: Callable[[Row], torch.Tensor],
    rows: Sequence[HeldRow],
    rounding: float,
    sight: Sight | None = None,
    layers: CompiledLayers | None = None,
    sent: SentMatrices | None = None,
) -> Reference:
    """Computes the rows twice. Of a sharded student a collective, which all ranks call.

    The second time with errors in the results of all modules. With hooks ``layers`` run eagerly.

    ``logits_of`` computes logits [T, V] with the student, in the dtype whose rounding is
    ``rounding``. ``sight`` is that of a VLM student. ``sent``: the matrices with which the engines
    compute, if the sender rounds them.
    """
    started = time.perf_counter()
    row = packed(rows, sight)
    with ExitStack() as hooked:
        if sent is not None:
            hooked.enter_context(layers.paused() if layers else nullcontext())
            hooked.enter_context(sent.within(student))
        exact = logits_of(row)
        jitter = Jitter.of(exact.device)
        with layers.paused() if layers else nullcontext(), jitter.within(student.modules()):
            moved = jitter(logits_of(row))
    before, after = _logprobs(exact, row, rows), _logprobs(moved, row, rows)
    noise = {
        kind: float(np.concatenate([np.abs(after[at] - before[at]) for at in each]).mean()) / JITTER
        for kind, each in by_kind(rows).items()
    }
    return Reference(tuple(rows), tuple(before), noise, rounding, time.perf_counter() - started)


def _logprobs(logits: torch.Tensor, packed: Row, rows: Sequence[HeldRow]) -> list[Float32]:
    """Of each row's compared tokens, at temperature 1, in nats."""
    found = []
    lengths = packed.starts.diff().tolist()
    for one, row in zip(torch.split(logits, lengths), rows, strict=True):
        targets = torch.from_numpy(row.ids[-row.compared :]).long().to(logits.device)[:, None]
        logprobs = one[-row.compared - 1 : -1].float().log_softmax(-1)
        found.append(logprobs.gather(1, targets)[:, 0].cpu().numpy())
    return found
