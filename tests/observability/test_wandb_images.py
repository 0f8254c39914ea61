"""Tables in wandb have a picture for each image of a sample."""

from __future__ import annotations

import json
from io import BytesIO
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from async_opd.core.row import Media
from async_opd.microscope import MICROSCOPE, RecordWriter
from async_opd.observability.run_log import RunLog
from async_opd.observability.wandb_sink import SampleTables
from async_opd.pictures import MEDIA, Thumbnails, thumbnail_file
from tests import wandb_rows
from tests.data.pictures import BLUE, RED
from tests.microscope.samples import record
from tests.observability.test_wandb_sink import config
from tests.pictures.test_folder import media


def write_samples(run_dir: Path) -> list[Media]:
    """Answers with two images, one, and none, and a generation with one; red has a thumbnail."""
    images = [media(RED), media(BLUE)]
    red = images[0]
    Thumbnails(run_dir / MEDIA, 1 << 20).keep([red], {red.sha256: RED})
    (run_dir / "evals").mkdir()
    lines: list[dict[str, Any]] = [{"uid": uid, "response": "1 2"} for uid in ("p0", "p1", "p2")]
    lines[0]["images"] = [image._asdict() for image in images]
    lines[1]["images"] = [red._asdict()]
    text = "".join(json.dumps(line) + "\n" for line in lines)
    (run_dir / "evals" / "step_2.jsonl").write_text(text)
    RecordWriter(run_dir / MICROSCOPE, 0, 1 << 20).write(1, [record("p7/1", images=(red,))])
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


@pytest.mark.slow
def test_an_offline_run_read_back_has_the_pictures_of_its_tables(tmp_path: Path) -> None:
    write_samples(tmp_path)
    with RunLog(config(), tmp_path) as log:
        log.log(1, {"loss/total": 2.5})
        log.log(2, {"eval/sort/accuracy": 0.5})
        log.finish("completed")
    assert log.failures == 0, (tmp_path / "run.log").read_text()
    import wandb  # here: ruff sorts it above by whether a folder wandb/ stands beside the tests

    wandb.teardown()  # its process has written all of the file when it has ended
    (path,) = (tmp_path / "wandb").glob("offline-run-*/run-*.wandb")
    tables = wandb_rows.table_files(path).values()
    (files,) = (one for one in tables if "evaluation/samples.table.json" in one)
    table = json.loads(files["evaluation/samples.table.json"].read_text())
    assert table["columns"] == ["uid", "response", "image 1", "image 2"]
    first, second, third = table["data"]
    assert [row[3] for row in (first, second, third)] == [None, None, None]
    assert third[2] is None
    for cell in (first[2], second[2]):
        assert (cell["_type"], cell["width"], cell["height"]) == ("image-file", 8, 4)
        shown = Image.open(BytesIO(files[cell["path"]].read_bytes()))
        assert shown.convert("RGB").getpixel((0, 0)) == (255, 0, 0)
    (files,) = (one for one in tables if "generations/samples.table.json" in one)
    table = json.loads(files["generations/samples.table.json"].read_text())
    assert table["columns"][-1] == "image"
    assert table["data"][0][-1]["_type"] == "image-file"
