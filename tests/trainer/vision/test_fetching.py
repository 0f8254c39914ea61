"""A rank fetches the images of its samples by their hashes, each once."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from async_opd.core.errors import AsyncOPDError
from tests.trainer.vision.seeing import Seen, seen
from trainer.vision.fetching import cache_of, shown_by

pytest.importorskip("torchvision")


SIGHT: Any = SimpleNamespace(cache_bytes=1 << 20, fetch_s=5.0)


class Images:
    """A queue that has these images, and notes who asks for which."""

    def __init__(self, data: Seen) -> None:
        self.encoded, self.asked = dict(data.encoded), []

    async def media(self, hashes: Sequence[str]) -> dict[str, bytes]:
        self.asked += hashes
        return {sha256: self.encoded[sha256] for sha256 in hashes if sha256 in self.encoded}


async def test_samples_of_the_same_image_fetch_it_once() -> None:
    data = seen("llava", [0], [], [1, 0], [0])
    queue: Any = Images(data)
    cache = cache_of(lambda: queue, SIGHT)
    assert await shown_by(data.samples, cache) == data.encoded
    assert await shown_by(data.samples[:1], cache) == {
        data.samples[0].rollout.prompt.media[0].sha256: queue.encoded[queue.asked[0]]
    }
    assert sorted(queue.asked) == sorted(data.encoded)


async def test_the_cache_is_as_large_as_the_config_says() -> None:
    data = seen("llava", [0])
    queue: Any = Images(data)
    cache = cache_of(lambda: queue, SimpleNamespace(cache_bytes=1, fetch_s=5.0))  # type: ignore[arg-type]
    for _ in range(2):
        await shown_by(data.samples, cache)
    assert len(queue.asked) == 2


def test_a_student_that_reads_text_only_has_no_cache() -> None:
    queue: Any = None
    assert cache_of(lambda: queue, None) is None


async def test_text_asks_for_nothing() -> None:
    data = seen("llava", [], [])
    queue: Any = Images(data)
    assert await shown_by(data.samples, cache_of(lambda: queue, SIGHT)) == {}
    assert queue.asked == []


async def test_an_image_that_the_queue_lacks_names_the_sample() -> None:
    data = seen("llava", [0])
    queue: Any = Images(data)
    queue.encoded = {}
    with pytest.raises(AsyncOPDError, match="p0/0"):
        await shown_by(data.samples, cache_of(lambda: queue, SIGHT))


async def test_a_header_tells_the_sizes_of_a_samples_images() -> None:
    assert [one.header.images for one in seen("llava", [0, 1], []).samples] == [
        ((56, 84), (56, 84)),
        (),
    ]
