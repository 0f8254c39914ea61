"""Tables in wandb have a picture for each image of a sample."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np

from async_opd.core.row import Media
from async_opd.microscope import MICROSCOPE, RecordWriter
from async_opd.observability.wandb_sink import SampleTables
from async_opd.pictures import MEDIA, Thumbnails, thumbnail_file
from tests.data.pictures import BLUE, RED
from tests.microscope.samples import record
from tests.pictures.test_pictures import media


def write_samples(run_dir: Path, **more: Any) -> list[Media]:
    """Answers with two images, one, and none, and a generation with one; red has a thumbnail."""
    images = [media(RED), media(BLUE)]
    red = images[0]
    Thumbnails(run_dir / MEDIA, 1 << 20).keep([red], {red.sha256: RED})
    (run_dir / "evals").mkdir()
    answer = {"response": "1 2", **more}
    lines: list[dict[str, Any]] = [{"uid": uid, **answer} for uid in ("p0", "p1", "p2")]
    lines[0]["images"] = [image._asdict() for image in images]
    lines[1]["images"] = [red._asdict()]
    text = "".join(json.dumps(line) + "\n" for line in lines)
    (run_dir / "evals" / "step_2.jsonl").write_text(text)
    generated = {"token": np.array([7, 8, 8], np.int32)}
    one = record("p7/1", columns=generated, tokens=3, images=(red,))
    RecordWriter(run_dir / MICROSCOPE, 0, 1 << 20).write(1, [one])
    return images


def test_a_table_has_the_thumbnails_of_each_row_and_no_text_of_them(tmp_path: Path) -> None:
    red, _ = write_samples(tmp_path)
    file = thumbnail_file(tmp_path, red.sha256)
    answers = SampleTables(tmp_path).answers(2, {"eval/a/accuracy": 1.0})
    assert answers is not None
    assert answers.columns == ["uid", "response"]
    assert answers.images == [[file, None], [file], []]
    generations = SampleTables(tmp_path).generations(1)
    assert generations is not None
    assert "images" not in generations.columns
    assert generations.images == [[file]]
