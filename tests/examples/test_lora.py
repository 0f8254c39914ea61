"""The quickstart with LoRA, from start to export."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.cluster.test_run import Run, Running
from tests.examples.test_quickstart_assets import QUICKSTART, accuracy

pytestmark = [pytest.mark.engine, pytest.mark.long]

EXAMPLE = Path(__file__).parents[2] / "examples" / "lora.yaml"
OF_ALL_WEIGHTS = {"reverse": 1.0, "sort": 0.988}
"""Accuracy of the quickstart's run, in which all weights are trained (README.md)."""


@pytest.fixture(scope="module")
def done(tmp_path_factory: pytest.TempPathFactory) -> Run:
    whole = ("train.steps=200", "async.sync_steps=4", "eval.max_prompts=null", "eval.every=0")
    exact = ("train.export_dtype=float32", "log.wandb=off")
    directory = tmp_path_factory.mktemp("runs") / "lora"
    return Running(directory, *whole, *exact, example=EXAMPLE).end(900)


def test_it_learns_what_a_run_of_all_weights_learns(done: Run) -> None:
    assert done.code == 0, done.output
    found = {source: done.summary[f"eval/{source}/accuracy"] for source in OF_ALL_WEIGHTS}
    for source, full in OF_ALL_WEIGHTS.items():
        assert found[source] >= 0.95 * full, found


@pytest.mark.parametrize("source", OF_ALL_WEIGHTS)
def test_the_merged_export_has_learned_it(source: str, done: Run) -> None:
    assert accuracy(str(done.directory / "model"), source) >= 0.95 * OF_ALL_WEIGHTS[source]


def test_the_peft_directory_computes_what_the_merged_export_computes(done: Run) -> None:
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    merged = AutoModelForCausalLM.from_pretrained(done.directory / "model", dtype=torch.float32)
    base = AutoModelForCausalLM.from_pretrained(
        QUICKSTART / "models" / "student", dtype=torch.float32
    )
    both = PeftModel.from_pretrained(base, done.directory / "model" / "adapter")
    ids = torch.arange(3, 20)[None]
    with torch.no_grad():
        assert torch.allclose(both.eval()(ids).logits, merged.eval()(ids).logits, atol=1e-4)
