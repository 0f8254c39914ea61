"""The quickstart with LoRA, from start to export."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.cluster.test_run import ONE_TEACHER, Run, Running
from tests.examples.accuracy import QUICKSTART, accuracy

pytestmark = [pytest.mark.engine, pytest.mark.long, pytest.mark.slow]

EXAMPLE = Path(__file__).parents[2] / "examples" / "lora.yaml"
OF_ALL_WEIGHTS = {"reverse": 1.0, "sort": 0.988}
"""Accuracy of the quickstart's run, in which all weights are trained (README.md)."""


@pytest.fixture(scope="module")
def done(tmp_path_factory: pytest.TempPathFactory) -> Run:
    whole = ("train.steps=200", "async.sync_steps=4", "eval.max_prompts=null", "eval.every=0")
    exact = ("train.export_dtype=float32", "log.wandb=off")
    directory = tmp_path_factory.mktemp("runs") / "lora"
    return Running(directory, *whole, *exact, example=EXAMPLE).end(1800)


@pytest.mark.whole
def test_it_learns_what_a_run_of_all_weights_learns(done: Run) -> None:
    assert done.code == 0, done.output
    found = {source: done.summary[f"eval/{source}/accuracy"] for source in OF_ALL_WEIGHTS}
    for source, full in OF_ALL_WEIGHTS.items():
        assert found[source] >= 0.95 * full, found


@pytest.mark.whole
@pytest.mark.parametrize("source", OF_ALL_WEIGHTS)
def test_the_merged_export_has_learned_it(source: str, done: Run) -> None:
    assert accuracy(str(done.directory / "model"), source) >= 0.95 * OF_ALL_WEIGHTS[source]


@pytest.mark.whole
def test_the_peft_directory_computes_what_the_merged_export_computes(done: Run) -> None:
    _computes_the_same(done.directory / "model")


@pytest.fixture(scope="module")
def as_adapter(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """Eight steps and four weight syncs, whose versions the engines take as adapters."""
    few = ("train.steps=8", "async.sync_steps=2", "train.batch_size=16", "train.lora.rank=4")
    directory = tmp_path_factory.mktemp("runs") / "as_adapter"
    exact = ("train.export_dtype=float32", "log.wandb=off", "eval.every=0", "eval.max_prompts=4")
    options = ("train.lora.sync=adapter", ONE_TEACHER, "eval.teachers=false", *few, *exact)
    return Running(directory, *options, example=EXAMPLE).end()


def test_engines_answer_with_the_adapter_of_the_last_version(as_adapter: Run) -> None:
    assert as_adapter.ended(0, "completed"), as_adapter.output
    assert as_adapter.summary["train/version"] == 4
    versions = [as_adapter.summary[f"eval/{age}_version"] for age in ("oldest", "newest")]
    assert versions == [4, 4]


def test_a_sync_of_adapters_sends_a_fraction_of_the_weights(as_adapter: Run) -> None:
    weights = (QUICKSTART / "models" / "student" / "model.safetensors").stat().st_size / 2**20
    sent = [row["sync/mib"] for row in as_adapter.metrics if "sync/mib" in row]
    assert sent
    assert all(0 < mib < weights / 4 for mib in sent), (sent, weights)


def test_the_adapter_that_was_synced_is_exported_for_peft(as_adapter: Run) -> None:
    assert as_adapter.code == 0, as_adapter.output
    _computes_the_same(as_adapter.directory / "model")


def _computes_the_same(exported: Path) -> None:
    """The merged export, and the adapter beside it on the student of the start."""
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    merged = AutoModelForCausalLM.from_pretrained(exported, dtype=torch.float32)
    base = AutoModelForCausalLM.from_pretrained(
        QUICKSTART / "models" / "student", dtype=torch.float32
    )
    both = PeftModel.from_pretrained(base, exported / "adapter")
    ids = torch.arange(3, 20)[None]
    with torch.no_grad():
        assert torch.allclose(both.eval()(ids).logits, merged.eval()(ids).logits, atol=1e-4)
