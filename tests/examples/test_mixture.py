"""A mixture of experts learns both tasks from dense teachers, in a whole run."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.cluster.test_run import EXAMPLE, Run, Running
from tests.examples.accuracy import QUICKSTART, accuracy

STUDENT = QUICKSTART / "models" / "student"
EXPERTS = 4


def upcycled(path: Path, noise: float) -> Any:
    """The quickstart's student with four experts in place of each MLP: copies of it with noise.

    Without noise it computes what the student computes: weights of two experts sum to 1.
    """
    from transformers import AutoModelForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM

    torch.manual_seed(0)
    dense = AutoModelForCausalLM.from_pretrained(STUDENT, dtype=torch.float32)
    settings = json.loads((STUDENT / "config.json").read_text())
    inner = settings["intermediate_size"]
    kept = {k: v for k, v in settings.items() if k not in ("architectures", "model_type")}
    sizes = {"moe_intermediate_size": inner, "num_experts": EXPERTS, "num_experts_per_tok": 2}
    made = Qwen3MoeForCausalLM(Qwen3MoeConfig(**kept, **sizes, norm_topk_prob=True))
    weights = dense.state_dict()
    for index in range(settings["num_hidden_layers"]):
        part = f"model.layers.{index}.mlp"
        gate, up, down = (
            weights.pop(f"{part}.{one}_proj.weight") for one in ("gate", "up", "down")
        )
        joined = {"gate_up_proj": torch.cat([gate, up]), "down_proj": down}
        for name, weight in joined.items():
            experts = weight.repeat(EXPERTS, 1, 1)
            weights[f"{part}.experts.{name}"] = experts + noise * torch.randn_like(experts)
        weights[f"{part}.gate.weight"] = torch.randn(EXPERTS, settings["hidden_size"]) / 10
    made.load_state_dict(weights)
    shutil.copytree(STUDENT, path, ignore=shutil.ignore_patterns("*.safetensors", "config.json"))
    made.save_pretrained(path)
    return made.eval()


def test_experts_that_are_copies_compute_what_the_dense_student_computes(tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    dense = AutoModelForCausalLM.from_pretrained(STUDENT, dtype=torch.float32).eval()
    ids = torch.arange(3, 20)[None]
    with torch.no_grad():
        difference = upcycled(tmp_path / "student", 0.0)(ids).logits - dense(ids).logits
    assert float(difference.abs().max()) < 1e-4


@pytest.fixture(scope="module")
def done(tmp_path_factory: pytest.TempPathFactory) -> Run:
    directory = tmp_path_factory.mktemp("runs")
    upcycled(directory / "student", 0.01)
    sizes = ("train.steps=60", "async.sync_steps=4", "eval.every=0", "eval.max_prompts=null")
    student = f"student.model={directory / 'student'}"
    return Running(directory / "mixture", student, *sizes, "log.wandb=off", example=EXAMPLE).end(
        900
    )


@pytest.mark.engine
@pytest.mark.long
@pytest.mark.whole
def test_a_mixture_learns_from_dense_teachers(done: Run) -> None:
    assert done.code == 0, done.output
    before, after = (
        [done.summary[f"{when}/{source}/accuracy"] for source in ("sort", "reverse")]
        for when in ("eval_initial", "eval")
    )
    assert sum(after) > sum(before) + 0.5, (before, after)
    assert done.summary["sync/wrong_weights"] == 0
    export = str(done.directory / "model")
    for source in ("sort", "reverse"):
        share = accuracy(export, source)
        assert share == pytest.approx(done.summary[f"eval/{source}/accuracy"], abs=0.15), source
