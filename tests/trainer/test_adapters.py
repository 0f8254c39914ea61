"""LoRA: what is trained, what its first steps are, and what others get of it."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import torch

from async_opd.config.sections.train import LoraConfig, TrainConfig
from async_opd.core.errors import CheckpointError, StageError
from async_opd.files.safe_open import FOLDER_MODE
from async_opd.weight_sync.layout import WeightMeta
from tests.trainer.models import VOCABULARY, new_rank, random_sample, tiny_model
from tests.trainer.states import restore, state_of
from tests.trainer.test_named_weights import mixture
from trainer.learner import Learner
from trainer.rank import Rank
from trainer.saving import state as state_module
from trainer.saving.state import frozen_digest
from trainer.student.adapters import (
    LORA,
    adapter_state,
    add_adapters,
    halve_frozen,
    plain_state,
    write_adapter,
)
from trainer.student.check import check_placed, check_student
from trainer.student.named_weights import named_weights

LORA_4 = LoraConfig(rank=4, alpha=8)
IDS = torch.arange(3, 15)[None] % VOCABULARY


def adapted(lora: LoraConfig = LORA_4, seed: int = 0) -> Any:
    """A student whose adapters have not learned anything yet."""
    made = tiny_model(seed).eval()
    add_adapters(made, lora)
    return made


def learned(lora: LoraConfig = LORA_4) -> Any:
    """A student whose adapters change what it computes."""
    made = adapted(lora)
    for name, parameter in made.named_parameters():
        if ".lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.2)
    return made


def rank_of(model: Any, **train: Any) -> Rank:
    config = TrainConfig(lr=1e-2, warmup_steps=0, steps=50, lora=LORA_4, **train)
    return new_rank(model, config)


def learner(model: Any, **train: Any) -> Learner:
    return Learner(rank_of(model, **train))


def batch() -> list[Any]:
    return [random_sample(index, 4 + index, k=6) for index in range(3)]


def logits(model: Any) -> torch.Tensor:
    with torch.no_grad():
        return model(IDS).logits


def merged(model: Any) -> Any:
    """The plain student that has the model's weights as engines get them."""
    plain = tiny_model(seed=5).eval()
    plain.load_state_dict(dict(named_weights(model, torch.float32)), strict=False)
    return plain


def values(model: Any) -> dict[str, torch.Tensor]:
    return {name: parameter.detach().clone() for name, parameter in model.named_parameters()}


def test_a_student_with_new_adapters_is_the_base_bit_for_bit() -> None:
    assert torch.equal(logits(adapted()), logits(tiny_model().eval()))


def test_the_first_step_changes_only_b_and_only_adapters_have_moments() -> None:
    model = adapted()
    before, made = values(model), learner(model)
    made.train_batch(batch())
    changed = {n for n, value in values(model).items() if not torch.equal(value, before[n])}
    assert changed == {name for name in before if ".lora_B" in name}
    moments = {name.split("/")[1] for name in state_of(made) if name.startswith("optimizer/")}
    assert moments == {name for name in before if LORA in name}


def test_the_gradient_of_b_is_the_full_gradient_on_the_rows_of_a() -> None:
    """∂/∂B of f(W + s B A) is s ∂/∂W Aᵀ."""
    model = adapted()
    full = tiny_model().eval()
    for one in (model, full):
        one(IDS).logits.log_softmax(-1)[..., 5].sum().backward()
    gradients = dict(full.named_parameters())
    for name, parameter in model.named_parameters():
        if ".lora_B" not in name:
            continue
        owner = name.partition(LORA)[0]
        rows = model.get_parameter(name.replace("lora_B", "lora_A"))
        expected = 2.0 * gradients[f"{owner}.weight"].grad @ rows.detach().T
        assert torch.allclose(parameter.grad, expected, atol=1e-5), name


@pytest.mark.parametrize("use_rslora", [False, True])
def test_merged_weights_compute_what_the_adapters_compute(use_rslora: bool) -> None:
    model = learned(LoraConfig(rank=4, alpha=8, use_rslora=use_rslora))
    found = logits(merged(model))
    assert torch.allclose(found, logits(model), atol=1e-5)
    assert not torch.allclose(found, logits(tiny_model().eval()), atol=1e-2)


def test_merging_changes_no_weight_and_adapters_are_sent_as_a_and_the_scaled_b() -> None:
    model = learned()
    before = values(model)
    one, two = (dict(named_weights(model, torch.bfloat16)) for _ in range(2))
    assert all(torch.equal(before[name], value) for name, value in values(model).items())
    assert all(torch.equal(one[name], two[name]) for name in one)
    sent = dict(adapter_state(model))
    name = "base_model.model.model.layers.0.mlp.up_proj.lora_B.weight"
    own = model.get_parameter("model.layers.0.mlp.up_proj.lora_B.default.weight")
    assert torch.equal(sent[name], 2.0 * own)
    assert len(sent) == 2 * 7 * 2


@pytest.mark.parametrize("sync", ["merged", "adapter"])
def test_a_sync_of_adapters_is_told_from_one_of_weights(sync: str) -> None:
    lora = LoraConfig.model_validate({"rank": 4, "sync": sync})
    config, model = TrainConfig(lora=lora), adapted(lora)
    rank = new_rank(model, config)
    names = tuple(name for name, _ in rank.weights.sent())
    assert WeightMeta(names, (), (), ()).adapters is (sync == "adapter")
    assert not WeightMeta((), (), (), ()).adapters


def test_adapters_of_some_layers_only() -> None:
    names = [
        name for name in values(adapted(LoraConfig(rank=2, targets=["q_proj"]))) if LORA in name
    ]
    assert {name.partition(LORA)[0].rpartition(".")[2] for name in names} == {"q_proj"}


def test_a_target_that_is_no_layer_is_refused_with_those_that_are() -> None:
    with pytest.raises(StageError, match=r"no linear layer lm_head.*have an adapter") as error:
        adapted(LoraConfig(rank=2, targets=["q_proj", "lm_head"]))
    assert "q_proj" in error.value.remedy


def test_experts_and_routers_of_a_mixture_stay_frozen() -> None:
    model = mixture()
    add_adapters(model, LORA_4)
    trained = {name for name, p in model.named_parameters() if p.requires_grad}
    assert {name.partition(LORA)[0].rpartition(".")[2] for name in trained} == {
        *("q_proj", "k_proj", "v_proj", "o_proj")
    }
    assert (
        dict(named_weights(model, torch.float32)).keys()
        == dict(named_weights(mixture(), torch.float32)).keys()
    )


def test_a_restored_student_goes_on_bit_for_bit_on_the_base_of_its_own_files() -> None:
    one = learner(adapted())
    one.train_batch(batch())
    state = state_of(one)
    one.train_batch(batch())
    assert [name for name in state if name.startswith("model/") and LORA not in name] == []
    two = learner(adapted())
    restore(two, 1, state)
    two.train_batch(batch())
    own, other = values(one.model), values(two.model)
    assert [name for name in own if not torch.equal(own[name], other[name])] == []


def test_adapters_of_another_rank_are_refused() -> None:
    with pytest.raises(CheckpointError, match="another model"):
        restore(learner(adapted(LoraConfig(rank=2))), 1, state_of(learner(adapted())))


def test_adapters_of_another_base_of_the_same_shapes_are_refused(tmp_path: Path) -> None:
    one = learner(adapted(seed=0))
    one.capture(version=0)
    one.write(str(tmp_path))
    other = learner(adapted(seed=1))
    before = values(other.model)
    with pytest.raises(CheckpointError, match="frozen weights of another model"):
        other.restore(str(tmp_path))
    assert all(torch.equal(before[name], now) for name, now in values(other.model).items())


def test_the_base_of_adapters_is_the_same_in_bfloat16(tmp_path: Path) -> None:
    one = learner(adapted())
    one.capture(version=3)
    one.write(str(tmp_path))
    other = adapted()
    halve_frozen(other)
    assert learner(other).restore(str(tmp_path))[1] == 3


@pytest.mark.parametrize("ranks", [3, 8])
def test_the_first_rank_knows_the_adapters_base(
    ranks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = adapted()
    whole = frozen_digest(model)
    monkeypatch.setattr(state_module, "own_part", lambda tensor: tensor.chunk(ranks)[0])
    assert frozen_digest(model) == whole


def test_frozen_matrices_are_bfloat16_where_the_student_computes_in_it() -> None:
    model = learned()
    exact = check_student(model)
    check_placed(rank_of(model, dtype="bfloat16").student, exact)
    matrices = {name: p for name, p in model.named_parameters() if p.ndim >= 2}
    assert {p.dtype for n, p in matrices.items() if LORA in n} == {torch.float32}
    assert {p.dtype for n, p in matrices.items() if LORA not in n} == {torch.bfloat16}


def test_a_step_in_bfloat16_is_close_to_one_in_float32() -> None:
    one, two = (learner(learned(), dtype=dtype) for dtype in ("float32", "bfloat16"))
    losses = [made.train_batch(batch()).metrics["loss/total"] for made in (one, two)]
    assert losses[1] == pytest.approx(losses[0], rel=0.03)


def test_the_export_is_a_merged_model_and_a_peft_directory(tmp_path: Path) -> None:
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    model = learned()
    tiny_model().save_pretrained(tmp_path / "source")
    learner(model).save(str(tmp_path / "source"), str(tmp_path / "model"))
    plain = AutoModelForCausalLM.from_pretrained(tmp_path / "model", dtype=torch.float32).eval()
    base = AutoModelForCausalLM.from_pretrained(tmp_path / "source", dtype=torch.float32)
    both = PeftModel.from_pretrained(base, tmp_path / "model" / "adapter").eval()
    assert torch.allclose(logits(plain), logits(model), atol=1e-5)
    assert torch.allclose(logits(both), logits(model), atol=1e-6)
    names = {name for name, _ in plain.named_parameters()}
    assert names == {name for name, _ in plain_state(model)}


def test_an_export_with_adapters_is_private_and_on_the_disk_before_it_has_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    flushed: set[Path] = set()
    rename = Path.rename

    def renamed(self: Path, target: Path) -> Path:
        if self.name == "model.part":
            assert {self, *self.rglob("*")} <= flushed
        return rename(self, target)

    monkeypatch.setattr("trainer.saving.export.flush", flushed.add)
    monkeypatch.setattr(Path, "rename", renamed)
    source = tmp_path / "source"
    tiny_model().save_pretrained(source)
    learner(learned()).save(str(source), str(tmp_path / "model"))
    adapter = tmp_path / "model" / "adapter"
    assert adapter.stat().st_mode & 0o777 == FOLDER_MODE
    assert tmp_path in flushed


def test_no_error_of_a_later_sync_adds_up() -> None:
    """After syncs between all steps the weights are those of one sync after all steps."""
    model = adapted()
    made = learner(model)
    other = copy.deepcopy(model)
    silent = learner(other)
    for _ in range(5):
        made.train_batch(batch())
        silent.train_batch(batch())
        dict(made.named_weights())
    one, two = dict(made.named_weights()), dict(silent.named_weights())
    assert all(torch.equal(one[name], two[name]) for name in one)


def test_an_adapters_files_name_no_folder_of_this_machine(tmp_path: Path) -> None:
    write_adapter(learned(), "/home/me/private/student", {}, tmp_path / "adapter")
    written = json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())
    assert written["base_model_name_or_path"] == "./student"
