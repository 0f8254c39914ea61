"""The task without pictures: five digits in order."""

from collections.abc import Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

TASK = "sort"
DIGITS = 5
IN_FILES = 20_000
"""Codes that may be in files; models are trained and measured on the others."""
_SEED = 4


def codes() -> NDArray[np.int64]:
    """All codes of five digits, in a fixed random order."""
    return np.random.default_rng(_SEED).permutation(10**DIGITS)


def question(code: int) -> tuple[str, str]:
    """The question and the answer of a code."""
    digits = f"{code:0{DIGITS}}"
    return f"{TASK} {digits}=", "".join(sorted(digits))


def rows(number: int) -> Iterator[dict[str, Any]]:
    """Rows without pictures. ValueError for more than there are."""
    if number > IN_FILES:
        raise ValueError(f"{number} rows are more than the {IN_FILES} codes for files")
    for code in codes()[:number]:
        prompt, answer = question(int(code))
        yield {"prompt": prompt, "answer": answer, "data_source": TASK, "images": None}
