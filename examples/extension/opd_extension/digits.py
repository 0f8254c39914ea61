"""Six random digits to sort or to reverse."""

from __future__ import annotations

import random
from collections.abc import Iterator


def digits(count: int, seed: int = 0) -> Iterator[dict[str, str]]:
    """Yields ``count`` rows, the same ones in every call."""
    draw = random.Random(seed)
    for _ in range(count):
        text = "".join(draw.choices("0123456789", k=6))
        if draw.random() < 0.5:
            yield {
                "prompt": f"sort {text}=",
                "answer": "".join(sorted(text)),
                "data_source": "sort",
            }
        else:
            yield {"prompt": f"reverse {text}=", "answer": text[::-1], "data_source": "reverse"}
