"""The recipes: each is a valid config that fits the GPUs it names."""

from __future__ import annotations

import re
from pathlib import Path
from string import Formatter

import pytest
import yaml

from async_opd.checks.memory_fit import faults_of_memory, near
from async_opd.config.load import load_config
from async_opd.memory.pools import GIB, Machine
from async_opd.models.model_size import ModelSize
from async_opd.tools.report.facts import gpus_of

ROOT = Path(__file__).parents[2]
TEXTS = {path.stem: path.read_text() for path in (ROOT / "examples" / "recipes").glob("*.yaml")}
(TEXTS["README"],) = re.findall(
    r"```yaml\n(.*?)```", (ROOT / "README.md").read_text(), flags=re.DOTALL
)
SIZES = {
    "1.7b": ModelSize(
        1_720_574_976, 0, 2048, 6144, 28, 151_936, embeddings=151_936,
        query=2048, key=1024, heads=16, query_norms=True,
    ),
    "8b": ModelSize(
        8_190_735_360, 0, 4096, 12_288, 36, 151_936, embeddings=303_872,
        query=4096, key=1024, heads=32, query_norms=True,
    ),
    "mopd": ModelSize(
        3_075_098_624, 0, 2048, 11_008, 36, 128_256, embeddings=128_256,
        query=2048, key=512, heads=16,
    ),
}  # fmt: skip
"""Sizes of Qwen3-1.7B, Qwen3-8B and SmolLM3-3B, by a part of their names."""
FIELDS = {
    "gsm8k_few_shot_teacher": {"question", "answer"},
    "privileged_self_distillation": {"problem", "solution", "answer"},
}
"""Fields of the data rows of the recipes whose teachers read other prompts."""


def size(model: str) -> ModelSize:
    """The size of a recipe's model, in place of the model's own files."""
    return next(found for part, found in SIZES.items() if part in model.lower())


@pytest.mark.parametrize("recipe", sorted(TEXTS))
def test_a_recipe_fits_the_gpus_it_names(recipe: str) -> None:
    config = load_config(yaml.safe_load(TEXTS[recipe]))
    named = re.search(r"GPUs: (\d+) of (\d+) GB", TEXTS[recipe])
    assert named is not None
    machine = Machine("cuda", int(79.2 * GIB), size)
    assert named.group(2) == "80"
    assert list(faults_of_memory(config, machine)) == []
    assert list(near(config, machine)) == []
    assert int(named.group(1)) == gpus_of(config)


@pytest.mark.parametrize("recipe", sorted(TEXTS))
def test_every_row_of_a_recipe_has_a_teacher_and_every_teacher_rows(recipe: str) -> None:
    config = load_config(yaml.safe_load(TEXTS[recipe]))
    routed = {s for name, t in config.teachers.items() for s in t.sources or [name]}
    assert {source.model_dump()["data_source"] for source in config.data.train} == routed
    assert {source.model_dump()["data_source"] for source in config.data.eval} <= routed


@pytest.mark.parametrize("recipe", sorted(TEXTS))
def test_a_teachers_prompt_reads_fields_of_the_data(recipe: str) -> None:
    for teacher in load_config(yaml.safe_load(TEXTS[recipe])).teachers.values():
        fields = {field for _, field, _, _ in Formatter().parse(teacher.prompt_template or "")}
        assert fields - {None} <= FIELDS.get(recipe, set())
