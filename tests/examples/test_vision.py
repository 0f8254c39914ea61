"""The drawn pictures of examples/vision show what their answers say, and are read as data."""

from __future__ import annotations

import json
import subprocess
import sys
from collections import Counter
from io import BytesIO
from itertools import product
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray
from PIL import Image

from async_opd.config.sections.data import DataConfig
from async_opd.core.row import Row
from async_opd.data.files import FileSource
from async_opd.data.stored_rows import StoredRows, read_source

VISION = Path(__file__).parents[2] / "examples" / "vision"
PICTURED = ("count", "larger", "digit")
Ink = NDArray[np.bool_]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> dict[str, StoredRows]:
    """The rows of both files of a small run of the script."""
    out = tmp_path_factory.mktemp("vision")
    sizes = ["--train", "48", "--eval", "16"]
    command = [sys.executable, str(VISION / "make.py"), "--out", str(out), *sizes]
    subprocess.run(command, check=True, timeout=100, capture_output=True)
    names = ("train", "eval")
    sources = {name: FileSource(path=str(out / "data" / f"{name}.parquet")) for name in names}
    return {name: read_source(one, 0, DataConfig(train=[])) for name, one in sources.items()}


def ink(row: Row) -> Ink:
    """The pixels that are not white."""
    (encoded,) = row.encoded.values()
    return (np.asarray(Image.open(BytesIO(encoded)).convert("RGB")) < 250).any(-1)


def shapes(picture: Ink) -> list[Ink]:
    """The connected parts of a picture, each cut out."""
    left, found = {(int(y), int(x)) for y, x in np.argwhere(picture)}, []
    while left:
        part, edge = set[tuple[int, int]](), {left.pop()}
        while edge:
            part |= edge
            near = {(y + dy, x + dx) for y, x in edge for dy, dx in product((-1, 0, 1), repeat=2)}
            edge = near & left
            left -= edge
        ys, xs = zip(*part, strict=True)
        cut = np.zeros((max(ys) - min(ys) + 1, max(xs) - min(xs) + 1), bool)
        cut[np.array(ys) - min(ys), np.array(xs) - min(xs)] = True
        found.append(cut)
    return found


def larger_shape(picture: Ink) -> str:
    """By the share of its bounds that a shape fills; a triangle has a tip, a cross an arm."""
    largest = max(shapes(picture), key=lambda one: one.size)
    if largest.mean() > 0.95:
        return "square"
    if largest.mean() > 0.7:
        return "circle"
    return "triangle" if largest[0].sum() < 3 else "cross"


def lit(picture: Ink) -> set[str]:
    """The segments of the digit that are lit, found by the ink at their middle."""
    ys, xs = np.nonzero(picture)
    top, left, height = int(ys.min()), int(xs.min()), int(np.ptp(ys))
    side = height // 2
    if np.ptp(xs) < side // 2:  # a digit 1 has ink at its right side only
        left = int(xs.max()) - side
    middles = {
        "a": (0.0, 0.5), "b": (0.5, 1.0), "c": (1.5, 1.0), "d": (2.0, 0.5),
        "e": (1.5, 0.0), "f": (0.5, 0.0), "g": (1.0, 0.5),
    }  # fmt: skip
    lit = set()
    for name, (y, x) in middles.items():
        row, column = top + round(y * side), left + round(x * side)
        around = picture[max(row - 2, 0) : row + 3, max(column - 2, 0) : column + 3]
        if around.mean() > 0.25:
            lit.add(name)
    return lit


def seen(row: Row) -> str:
    """The answer that the pixels of a row's picture give."""
    picture = ink(row)
    if row.data_source == "count":
        return str(len(shapes(picture)))
    if row.data_source == "larger":
        return larger_shape(picture)
    segments = ["abcdef", "bc", "abdeg", "abcdg", "bcfg", "acdfg", "acdefg", "abc", "abcdefg"]
    return str([*segments, "abcdfg"].index("".join(sorted(lit(picture)))))


@pytest.mark.parametrize("task", PICTURED)
def test_pictures_show_their_answers(made: dict[str, StoredRows], task: str) -> None:
    rows = [row for part in made.values() for row in part if row.data_source == task]
    assert len(rows) == 64
    assert [seen(row) for row in rows] == [row.answer for row in rows]


def test_each_task_has_all_of_its_answers(made: dict[str, StoredRows]) -> None:
    answers = {(row.data_source, row.answer) for row in made["train"] if row.images}
    assert Counter(task for task, _ in answers) == {"count": 6, "larger": 4, "digit": 10}


def test_no_picture_is_evaluated_on_that_is_trained_on(made: dict[str, StoredRows]) -> None:
    train, evaluation = (
        {row.images[0].sha256 for row in made[part] if row.images} for part in ("train", "eval")
    )
    assert (len(train), len(evaluation), len(train & evaluation)) == (144, 48, 0)


def test_the_text_task_has_rows_without_pictures_of_which_none_is_in_both_files(
    made: dict[str, StoredRows],
) -> None:
    train, evaluation = (
        {str(row.prompt) for row in made[part] if row.data_source == "sort"}
        for part in ("train", "eval")
    )
    assert (len(train), len(evaluation), len(train & evaluation)) == (48, 16, 0)
    rows = [row for row in made["train"] if row.data_source == "sort"]
    assert not any(row.images for row in rows)
    digits = [str(row.prompt).removeprefix("sort ").removesuffix("=") for row in rows]
    assert [row.answer for row in rows] == ["".join(sorted(one)) for one in digits]


def test_a_row_asks_about_its_picture(made: dict[str, StoredRows]) -> None:
    row = next(row for row in made["train"] if row.images)
    (message,) = row.prompt
    assert isinstance(message, dict)
    picture, question = message["content"]
    assert picture == {"type": "image", "image": row.images[0].sha256}
    assert question["text"].endswith("?")
    assert row.images[0][2:] == (32, 32)
    json.dumps(row.fields)  # the bytes are not in them
