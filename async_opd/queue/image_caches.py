"""Where replicas get the images of their prompts from: the queue, through a separate cache."""

from __future__ import annotations

from async_opd.config.run_config import RunConfig
from async_opd.core.stages import Queue
from async_opd.media.cache import FromQueue, MediaCache
from async_opd.models.model_files import is_vision_model


def image_caches(config: RunConfig, model: str, queue: Queue | None) -> tuple[MediaCache, ...]:
    """The cache of a model's replica, its last argument; none if the model takes no images.

    Without a queue there is none: the replica's requests then have no images.
    """
    if queue is None or not is_vision_model(model):
        return ()
    nbytes = config.data.image_cache_mib << 20
    return (MediaCache(FromQueue(queue), nbytes, config.timeouts.request_s),)
