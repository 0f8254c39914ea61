"""The images of a packed row: the inputs of the vision tower, and positions of their tokens.

    MicroBatch ──samples──► Packed ──images, decoded──► RowImages ──tower──► features by image
                                    ▲ each image once, however many samples show it

Positions are computed for each sequence alone, by the model's own ``get_rope_index`` where it has
one: the row has those of text beside them, by which transformers keeps sequences apart.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any, Self

import numpy as np
import torch

from async_opd.core.errors import StageError
from async_opd.core.row import Media
from async_opd.core.samples import Rollout, Sample
from async_opd.core.sequence import Int32
from async_opd.core.stages import TRAINER
from async_opd.media.cache import FETCH_S
from trainer.losses.base import Change
from trainer.vision.parts import is_vision_model

if TYPE_CHECKING:
    from async_opd.config.run_config import RunConfig
    from async_opd.models.processor import ImageProcessor

Images = Mapping[str, bytes] | None
"""Encoded images by SHA-256."""
Samples = Mapping[int, Sample] | Sequence[Sample]
"""Samples by their index in a batch."""
STAND_IN_PIXELS = 56
"""Width and height of the image that a rank computes to stay in step with the others."""


@dataclass(frozen=True)
class RowImages:
    """The decoder's inputs of a row's images.

    ``inputs`` are the model's own of the different images, such as ``pixel_values``. ``order`` are
    their indices in the order in which the row shows them; none where the images only keep a rank
    in step. ``positions`` [3, 1, T] of a model with positions of three dimensions.
    """

    inputs: Mapping[str, torch.Tensor]
    order: tuple[int, ...]
    positions: torch.Tensor | None = None

    def map(self, change: Change) -> Self:
        """The same with every tensor changed."""
        inputs = {name: change(one) for name, one in self.inputs.items()}
        positions = None if self.positions is None else change(self.positions)
        return replace(self, inputs=inputs, positions=positions)


def of_rollout(rollout: Rollout) -> tuple[Media, ...]:
    """The images of a sequence, in order."""
    return (*rollout.prompt.media, *rollout.media)


def has_dimensions(decoder: Any) -> bool:
    """Whether positions of the decoder have three dimensions (M-RoPE)."""
    return is_vision_model(decoder) and hasattr(decoder, "get_rope_index")


class Sight:
    """Gives packed rows their images. Of several ranks each computes some, if one does."""

    def __init__(
        self,
        load: Callable[[], ImageProcessor],
        decoder: Any,
        device: torch.device,
        ranks: int = 1,
        cache_bytes: int = 1 << 30,
        fetch_s: float = FETCH_S,
    ) -> None:
        """``load`` is called at the first image; ``decoder`` is asked for positions only.

        The rank keeps ``cache_bytes`` of encoded images, and waits ``fetch_s`` for one.
        """
        self.cache_bytes, self.fetch_s = cache_bytes, fetch_s
        self._load, self._decoder = load, decoder
        self._device, self._ranks = device, ranks
        self._stands_in = False
        self._blank: Mapping[str, torch.Tensor] = {}
        self._counted: dict[tuple[int, int], int] = {}

    @cached_property
    def _processor(self) -> ImageProcessor:
        return self._load()

    @property
    def placeholder_id(self) -> int:
        """The token that stands for an image in a prompt that is not expanded."""
        return self._processor.placeholder_id

    @property
    def unsampled_ids(self) -> tuple[int, ...]:
        """All tokens that stand for more than text."""
        return self._processor.unsampled_ids

    def expanded(self, ids: Int32, images: Sequence[bytes]) -> Int32:
        """Token ids int32 [P'] of a prompt [P] with one placeholder an image: ImageProcessor."""
        return self._processor.expand(ids, images)

    def begin(self, rollouts: Sequence[Rollout]) -> None:
        """Takes note of a step's rollouts on this rank. Of several ranks a collective.

        If any rank has images, rows without one compute a blank one that changes nothing: FSDP
        gathers the tower's weights, and sums its gradients, on all ranks or on none.
        """
        if self._ranks == 1:
            return
        some = torch.tensor(int(any(map(of_rollout, rollouts))), device=self._device)
        torch.distributed.all_reduce(some, torch.distributed.ReduceOp.MAX)
        self._stands_in = bool(some)

    def of(self, rollouts: Sequence[Rollout], encoded: Mapping[str, bytes]) -> RowImages | None:
        """The images of a row of these rollouts; None for text that no caller waits for.

        StageError for an image whose bytes are not there, and for tokens that are not those of the
        images.
        """
        shown = [one.sha256 for rollout in rollouts for one in of_rollout(rollout)]
        if not shown:
            return RowImages(self._stand_in(), ()) if self._stands_in else None
        distinct = {sha256: index for index, sha256 in enumerate(dict.fromkeys(shown))}
        if missing := [sha256 for sha256 in distinct if sha256 not in encoded]:
            raise StageError(
                TRAINER,
                f"{len(missing)} of {len(distinct)} images of a micro-batch are not there, the "
                f"first is {missing[0]}, of {_first(rollouts, missing[0])}",
                "resume the run: the driver reads images again from the data source",
            )
        inputs = self._processor.inputs([encoded[sha256] for sha256 in distinct])
        order = tuple(distinct[sha256] for sha256 in shown)
        return RowImages(inputs, order, self._positions(rollouts, inputs, order))

    def tokens(self, sizes: Sequence[tuple[int, int]]) -> int:
        """Tokens of images of these widths and heights; an upper bound."""
        for size in sizes:
            if size not in self._counted:
                self._counted[size] = self._processor.tokens(Media("", 0, *size))
        return sum(self._counted[size] for size in sizes)

    def _stand_in(self) -> Mapping[str, torch.Tensor]:
        if not self._blank:
            self._blank = self._processor.inputs([blank_image()])
        return self._blank

    def _positions(
        self, rollouts: Sequence[Rollout], inputs: Mapping[str, torch.Tensor], order: Sequence[int]
    ) -> torch.Tensor | None:
        """Of all tokens [3, 1, T], each sequence's by itself."""
        if not has_dimensions(self._decoder):
            return None
        parts, start = [], 0
        for rollout in rollouts:
            count = len(of_rollout(rollout))
            grids = inputs["image_grid_thw"][list(order[start : start + count])]
            parts.append(self._of_sequence(rollout, grids))
            start += count
        return torch.cat(parts, dim=-1)

    def _of_sequence(self, rollout: Rollout, grids: torch.Tensor) -> torch.Tensor:
        """Of one sequence, [3, 1, T]: those of each segment, by its own images."""
        ids = torch.from_numpy(rollout.token_ids.astype(np.int64))[None]
        config, parts, shown = self._decoder.config, [], 0
        kinds = (ids == config.image_token_id).int()
        tokens = grids.prod(-1).cumsum(0) // config.vision_config.spatial_merge_size**2
        for start, end in rollout.segments:
            own, before = slice(start, end), int(kinds[0, :end].sum())
            images = slice(shown, int((tokens <= before).sum()) if end < rollout.tokens else None)
            parts.append(self._of_segment(rollout, ids[:, own], kinds[:, own], grids[images]))
            shown = images.stop
        return torch.cat(parts, dim=-1)

    def _of_segment(
        self, rollout: Rollout, ids: torch.Tensor, kinds: torch.Tensor, grids: torch.Tensor
    ) -> torch.Tensor:
        if not len(grids):
            return torch.arange(ids.shape[1]).expand(3, 1, -1)
        try:
            found: torch.Tensor = self._decoder.get_rope_index(
                ids, mm_token_type_ids=kinds, image_grid_thw=grids
            )[0]
        except (RuntimeError, StopIteration) as error:
            raise StageError(
                TRAINER,
                f"{rollout.uid} has {int(kinds.sum())} tokens of {len(grids)} images, which are "
                f"patches of {grids.tolist()}: {type(error).__name__}: {error}",
                "processor_kwargs of trainer and engines have to be the same (student), and "
                "images need a token between them, which the chat template puts there",
            ) from error
        return found


def sight_of(config: RunConfig, model: Any, device: torch.device) -> Sight | None:
    """The source of images for the student of a run; None for one that reads text only."""
    from async_opd.models.processor import ImageProcessor

    student = config.student
    load = partial(
        ImageProcessor.load,
        student.model,
        trust_remote_code=student.trust_remote_code,
        processor_kwargs=student.processor_kwargs,
    )
    if not is_vision_model(model):
        return None
    kept = config.data.image_cache_mib << 20
    bound = config.timeouts.request_s
    return Sight(load, model.base_model, device, config.train.ranks, kept, bound)


def images_of(
    sight: Sight | None, rollouts: Sequence[Rollout], encoded: Mapping[str, bytes]
) -> RowImages | None:
    """The images of a row of these rollouts. StageError for those of a student of text only."""
    if sight is not None:
        return sight.of(rollouts, encoded)
    if wrong := [one.uid for one in rollouts if of_rollout(one)]:
        cause = f"{wrong[0]} has images, and the student's config.json no vision_config"
        raise StageError(TRAINER, cause, "choose a vision model as student.model")
    return None


def blank_image(pixels: int = STAND_IN_PIXELS) -> bytes:
    """A gray image of this width and height, encoded as PNG."""
    from io import BytesIO

    from PIL import Image

    made = BytesIO()
    Image.new("RGB", (pixels, pixels), (127, 127, 127)).save(made, "PNG")
    return made.getvalue()


def _first(rollouts: Sequence[Rollout], sha256: str) -> str:
    return next(r.uid for r in rollouts if any(m.sha256 == sha256 for m in of_rollout(r)))
