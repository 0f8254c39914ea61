"""How a rank gets the images that its samples show: from the queue, by their content.

samples ──hashes──► MediaCache ──not there──► queue
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence

from async_opd.core.samples import Sample
from async_opd.core.stages import Queue
from async_opd.media.cache import MediaCache
from trainer.vision.images import of_rollout

CACHE_BYTES = 1 << 30
"""Encoded images that a rank keeps: the rollouts of a prompt may be in several of its steps."""


def cache_of(queue: Callable[[], Queue]) -> MediaCache:
    """The images of the samples of a queue, which is asked for with the first of them."""

    async def fetch(hashes: Sequence[str]) -> Mapping[str, bytes]:
        return await queue().media(hashes)

    return MediaCache(fetch, CACHE_BYTES)


async def shown_by(samples: Iterable[Sample], media: MediaCache | None) -> dict[str, bytes]:
    """Encoded bytes by SHA-256 of all images that the samples show; raises as MediaCache.get."""
    encoded: dict[str, bytes] = {}
    for sample in samples if media is not None else ():
        images = of_rollout(sample.rollout)
        if new := [one for one in images if one.sha256 not in encoded]:
            got = await media.get(new, sample.rollout.uid)  # type: ignore[union-attr]
            encoded |= {one.sha256: each for one, each in zip(new, got, strict=True)}
    return encoded
