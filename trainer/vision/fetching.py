"""How a rank gets the images that its samples show: from the queue, by their content.

samples ──hashes──► MediaCache ──not there──► queue
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence

from async_opd.core.errors import RolloutFault, StageError
from async_opd.core.row import Media
from async_opd.core.samples import Sample
from async_opd.core.stages import TRAINER, Queue
from async_opd.core.uid import Uid
from async_opd.media.cache import MediaCache
from async_opd.waiting.deadline import gather_or_cancel
from trainer.batcher import Batcher, TrainBatch
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


async def shown_by(
    samples: Iterable[Sample], media: MediaCache | None
) -> tuple[dict[str, bytes], dict[Uid, str]]:
    """Encoded bytes by SHA-256 of all images that the samples show, and what cannot be seen.

    That is the reason by the uid of each sample with an image that the queue does not hold, or
    holds with other bytes. All images are waited for at the same time: several that the queue lacks
    take as long as one. Raises StageTimeout, and what a fetch raises, as MediaCache.get.
    """
    encoded: dict[str, bytes] = {}
    faults: dict[str, str] = {}
    if media is None:
        return {}, {}

    async def fetch(image: Media, uid: Uid) -> None:
        try:
            (encoded[image.sha256],) = await media.get([image], uid)
        except RolloutFault as fault:
            faults[image.sha256] = fault.cause

    shown = [
        (sample.rollout.uid, image) for sample in samples for image in of_rollout(sample.rollout)
    ]
    first = {image.sha256: (image, uid) for uid, image in reversed(shown)}
    await gather_or_cancel(*(fetch(image, uid) for image, uid in first.values()))
    return encoded, {uid: faults[one.sha256] for uid, one in shown if one.sha256 in faults}


def refuse_unseen(unseen: Mapping[Uid, str]) -> None:
    """StageError with the first reason, where no other samples can be taken instead."""
    for uid, cause in unseen.items():
        message = f"{len(unseen)} samples show images that cannot be had; {uid}: {cause}"
        raise StageError(TRAINER, message, "start again: the driver reads images anew")


async def take_seen(
    batcher: Batcher, version: int, media: MediaCache | None
) -> tuple[TrainBatch, dict[str, bytes]]:
    """Takes a batch for a step, as Batcher.take, and the images that its samples show.

    Samples that cannot be seen are dead letters, and another batch is chosen.
    """
    if media is None:
        return await batcher.take(version), {}
    while True:
        batch = await batcher.choose(lambda: version)
        encoded, unseen = await shown_by(batch.samples, media)
        await batcher.give_up(unseen)
        if not unseen and batcher.commit(batch, version):
            return batch, encoded
