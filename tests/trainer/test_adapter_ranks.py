"""LoRA on several ranks: frozen and trained parameters are sharded together, and merged."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from async_opd.config.load import load_config
from async_opd.config.sections.train import LoraConfig, TrainConfig
from tests.trainer.models import new_rank, random_sample, tiny_model
from tests.trainer.ranks import mesh_of, on_ranks
from tests.trainer.states import restore, state_of
from trainer.build import build_rank
from trainer.learner import Learner
from trainer.rank import Rank
from trainer.rank_group import RankSpec
from trainer.student.adapters import LORA, add_adapters

pytestmark = pytest.mark.slow

EXAMPLES = Path(__file__).parents[2] / "examples"
RANKS = 2
LORA_5 = LoraConfig(rank=5, alpha=10)
"""Two ranks divide five rows of A unequally."""
SIZES = [5, 1, 9, 3, 0, 7, 2]


CASES: dict[str, dict[str, Any]] = {
    "shard": {"ranks": RANKS, "dtype": "float32"},
    "shard, bfloat16": {"ranks": RANKS, "dtype": "bfloat16"},
    "replicate × context": {"ranks": 4, "replicate": 2, "context_parallel": 2, "dtype": "float32"},
}


def rank_of(spec: RankSpec | None, case: dict[str, Any]) -> Rank:
    model = tiny_model()
    add_adapters(model, LORA_5)
    layout = {"dtype": case["dtype"]} if spec is None else case
    train = TrainConfig(
        lr=1e-2, warmup_steps=0, tokens_per_micro_batch=16, max_grad_norm=0.5, **layout
    )
    return new_rank(model, train, mesh=mesh_of(spec, train.replicate))


def found_by(learner: Learner, folder: Path) -> dict[str, Any]:
    """What a learner makes: losses, weights, its state after the first step, and a saved model."""
    batch = [random_sample(i, size, k=6) for i, size in enumerate(SIZES)]
    losses = [learner.train_batch(batch).metrics["loss/total"]]
    state = state_of(learner)
    losses.append(learner.train_batch(batch).metrics["loss/total"])
    weights = dict(learner.named_weights())
    restore(learner, 1, state)
    learner.train_batch(batch)
    tiny_model().save_pretrained(folder / "source")
    learner.save(str(folder / "source"), str(folder / "model"))
    again = dict(learner.named_weights())
    return {"losses": losses, "state": state, "weights": weights, "again": again}


@pytest.fixture(scope="module", params=CASES)
def both(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[str, dict[str, Any], dict[str, Any], Path]:
    """The precision, what one rank found, what several found, and their folder."""
    case, folder = CASES[request.param], tmp_path_factory.mktemp("ranks")
    one = found_by(Learner(rank_of(None, case)), folder / "one")
    work = partial(found_by, folder=folder)
    several = on_ranks(case["ranks"], lambda spec: rank_of(spec, case), work)
    return case["dtype"], one, several, folder


def test_ranks_that_read_their_own_weights_have_the_same_adapters_and_the_base() -> None:
    """The student is made on meta and sharded there, its adapters are not."""
    config = load_config(EXAMPLES / "lora.yaml", [])

    def found(learner: Learner) -> dict[str, Any]:
        return {"weights": dict(learner.named_weights()), "state": state_of(learner)}

    several = on_ranks(RANKS, lambda spec: build_rank(config, "cpu", spec), found)
    stored = load_file(EXAMPLES / "quickstart" / "models" / "student" / "model.safetensors")
    assert several["weights"].keys() == stored.keys()
    assert all(torch.equal(several["weights"][name], stored[name].float()) for name in stored)
    alone = dict(build_rank(config, "cpu", None).model.named_parameters())
    adapters = {n.removeprefix("model/"): t for n, t in several["state"].items() if LORA in n}
    assert adapters
    assert all(torch.equal(alone[name], adapter) for name, adapter in adapters.items())


def test_several_ranks_train_adapters_as_one_does(both: Any) -> None:
    dtype, one, two, _ = both
    atol = 1e-5 if dtype == "float32" else 0.03  # a step of AdamW is 1e-2, whatever the gradient
    assert two["losses"] == pytest.approx(one["losses"], rel=1e-4 if dtype == "float32" else 0.03)
    assert list(two["weights"]) == list(one["weights"])
    for name, weight in one["weights"].items():
        assert torch.allclose(two["weights"][name], weight, atol=atol), name


def test_a_checkpoint_of_several_ranks_holds_the_whole_adapters_only(both: Any) -> None:
    _, one, two, _ = both
    kept, expected = ({n for n in f["state"] if not n.startswith("rng/")} for f in (two, one))
    assert kept == expected
    held = {name: t for name, t in two["state"].items() if name.startswith("model/")}
    assert all(LORA in name for name in held)
    assert {n: t.shape for n, t in held.items()} == {n: one["state"][n].shape for n in held}


def test_restored_ranks_repeat_their_step_bit_for_bit(both: Any) -> None:
    _, _, two, _ = both
    assert all(torch.equal(two["weights"][name], two["again"][name]) for name in two["weights"])


def test_the_model_that_several_ranks_save_is_merged(both: Any) -> None:
    from safetensors.torch import load_file

    _, _, two, folder = both
    saved = load_file(folder / "model" / "model.safetensors")
    assert saved.keys() == two["again"].keys()
    assert all(torch.allclose(saved[n].float(), two["again"][n]) for n in saved)
    assert (folder / "model" / "adapter" / "adapter_model.safetensors").exists()
