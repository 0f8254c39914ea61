"""How a rank gets the images that its samples show: from the queue, by their content.

samples ──hashes──► MediaCache ──not there──► queue
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence

from async_opd.core.samples import Sample
from async_opd.core.stages import Queue
from async_opd.media.cache import MediaCache
from trainer.vision.images import Sight, of_rollout


def cache_of(queue: Callable[[], Queue], sight: Sight | None) -> MediaCache | None:
    """The images of the samples of a queue, which is asked for with the first of them.

    None for a student that reads text only. The cache is kept between steps: the rollouts of a
    prompt may be in several of them.
    """
    if sight is None:
        return None

    async def fetch(hashes: Sequence[str]) -> Mapping[str, bytes]:
        return await queue().media(hashes)

    return MediaCache(fetch, sight.cache_bytes, sight.fetch_s)


async def shown_by(samples: Iterable[Sample], media: MediaCache | None) -> dict[str, bytes]:
    """Encoded bytes by SHA-256 of all images that the samples show; raises as MediaCache.get."""
    encoded: dict[str, bytes] = {}
    for sample in samples if media is not None else ():
        images = of_rollout(sample.rollout)
        if new := [one for one in images if one.sha256 not in encoded]:
            got = await media.get(new, sample.rollout.uid)  # type: ignore[union-attr]
            encoded |= {one.sha256: each for one, each in zip(new, got, strict=True)}
    return encoded
