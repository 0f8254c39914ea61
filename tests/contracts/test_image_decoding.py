"""vLLM's servers decode an image to the pixels that our engines and ranks get."""

from __future__ import annotations

import numpy as np
import pytest

import tests.engines  # noqa: F401 - the environment, before vllm is imported
from async_opd.media.decode import decode
from tests.media.test_decode import IMAGES


@pytest.mark.parametrize("name", IMAGES)
@pytest.mark.slow
def test_a_server_decodes_the_same_pixels(name: str) -> None:
    from vllm.multimodal.media.image import ImageMediaIO

    theirs = ImageMediaIO().load_bytes(IMAGES[name]).media
    assert np.array_equal(np.asarray(decode(IMAGES[name])), np.asarray(theirs))
