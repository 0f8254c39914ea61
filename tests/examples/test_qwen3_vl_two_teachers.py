"""The reference setting with two teachers: checked on files of the real shapes, within its GPUs."""

from __future__ import annotations

import json
from io import BytesIO
from pathlib import Path
from typing import Any

import pyarrow as arrow
import pyarrow.parquet as parquet
import pytest
import yaml
from PIL import Image

from async_opd.checks.memory_fit import faults_of_memory, near
from async_opd.checks.preflight import Inputs, preflight
from async_opd.config.load import load_config
from async_opd.config.run_config import RunConfig
from async_opd.memory.pools import GIB, Machine
from async_opd.models.model_size import ModelSize
from async_opd.tools.report.facts import gpus_of
from tests.examples.reference_shapes import write_models

EXAMPLE = Path(__file__).parents[2] / "examples" / "qwen3_vl_two_teachers.yaml"
KEYS = {
    "student.model": "Qwen3-VL-2B-Instruct",
    "teachers.gsm8k.model": "Qwen3-4B-Instruct-2507",
    "teachers.geo3k.model": "Qwen3-VL-4B-Instruct",
}

CLUSTER = ["cluster.address=auto", "cluster.device=cuda", "cluster.gpu_memory_gib=79"]
"""GPUs elsewhere: the memory of this machine's host says nothing about theirs."""


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return write_models(tmp_path_factory.mktemp("models"))


def local(models: dict[str, Path]) -> list[str]:
    """Overrides that name directories in place of the hub's ids."""
    return [f"{key}={models[name]}" for key, name in KEYS.items()]


def rows(entry: dict[str, Any]) -> list[dict[str, Any]]:
    """Rows with the fields of a data set of the example."""
    if entry["id"] == "openai/gsm8k":
        question = "A pen costs 3 coins and a book 8. How much are 2 pens and a book?"
        return [{"question": f"{n}. {question}", "answer": "2 * 3 + 8\n#### 14"} for n in range(9)]
    drawn = []
    for width in (300, 600, 900):
        file = BytesIO()
        Image.new("RGB", (width, 400), "white").save(file, "PNG")
        images = [{"bytes": file.getvalue(), "path": None}]
        drawn.append({"images": images, "problem": "<image>Find x.", "answer": "2 \\sqrt { 3 }"})
    return drawn


@pytest.fixture(scope="module")
def checked(models: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Inputs:
    """The findings of the checks, with files in place of the hub's data sets."""
    folder = tmp_path_factory.mktemp("data")
    example = yaml.safe_load(EXAMPLE.read_text(encoding="utf-8"))
    overrides = [*local(models), *CLUSTER]
    for part in ("train", "eval"):
        files = []
        for number, entry in enumerate(example["data"][part]):
            path = folder / f"{part}-{number}.parquet"
            parquet.write_table(arrow.Table.from_pylist(rows(entry)), path)
            kept = {k: v for k, v in entry.items() if k not in ("kind", "id", "config", "split")}
            files.append({"path": str(path), **kept})
        overrides.append(f"data.{part}={json.dumps(files)}")
    return preflight(load_config(EXAMPLE, overrides), EXAMPLE.name, 6)


@pytest.fixture(scope="module")
def config(models: dict[str, Path]) -> RunConfig:
    """The example with the directories in place of the hub's ids."""
    return load_config(EXAMPLE, local(models))


def test_the_files_have_the_real_sizes(models: dict[str, Path]) -> None:
    floats = {name: ModelSize.read(path).floats for name, path in models.items()}
    assert floats == {
        "Qwen3-VL-2B-Instruct": 2_127_532_032,
        "Qwen3-4B-Instruct-2507": 4_022_468_096,
        "Qwen3-VL-4B-Instruct": 4_437_815_808,
    }


def test_each_pool_fits_gpus_of_80_gb(config: RunConfig) -> None:
    assert gpus_of(config) == 6
    machine = Machine("cuda", int(79.2 * GIB))
    assert list(faults_of_memory(config, machine)) == []
    assert list(near(config, machine)) == []


def test_every_row_has_a_teacher_with_pictures_the_vlm(config: RunConfig, checked: Inputs) -> None:
    assert checked.problems == []
    for one in [row for part in checked.checked for row in part]:
        teacher = config.teacher_of(one.data_source)
        assert teacher == ("geo3k" if one.images else "gsm8k")
