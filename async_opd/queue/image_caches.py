"""Where replicas get the images of their prompts from: the queue, through a cache of their own."""

from __future__ import annotations

from async_opd.config.run_config import RunConfig
from async_opd.core.stages import Queue
from async_opd.media.cache import FromQueue, MediaCache
from async_opd.models.model_files import sees


def image_caches(config: RunConfig, model: str, queue: Queue | None) -> tuple[MediaCache, ...]:
    """The cache of a replica of a model, which it gets as its last argument; none if it sees none.

    Without a queue there is none: what the replica is asked then has no images.
    """
    if queue is None or not sees(model):
        return ()
    nbytes = config.data.image_cache_mib << 20
    return (MediaCache(FromQueue(queue), nbytes, config.timeouts.request_s),)
