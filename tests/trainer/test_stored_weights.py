"""Ranks read from a model's files the weights of ``from_pretrained``, bit by bit."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch.distributed.fsdp import fully_shard

from async_opd.core.errors import StageError
from benchmarks.local_ranks import in_processes
from tests.trainer import families
from tests.trainer.models import tiny_model
from trainer.rank_group import RankGroup, RankSpec
from trainer.student.loading import EmptyStudent
from trainer.student.named_weights import named_weights
from trainer.student.sharding import blocks_of, full_tensor, is_sharded, join_mesh, own_part
from trainer.student.stored_weights import StoredWeights

CPU = torch.device("cpu")
EXPERTS = {"num_experts": 5, "moe_intermediate_size": 16, "num_experts_per_tok": 2, "head_dim": 16}
LINEAR = {"layer_types": ["linear_attention", "full_attention"]}
FAMILIES: dict[str, Callable[[], Any]] = {
    "Qwen3": tiny_model,
    "SeedOss": families.seed_oss,
    "GPTBigCode": families.gpt_bigcode,
    "Mixtral": families.mixtral,
    "PhiMoE": families.phimoe,
    "Gemma 2": families.gemma2,
    "Granite": families.granite,
    "Cohere": families.cohere,
    "Phi3": families.phi3,
    "dynamic NTK": families.dynamic_ntk,
    "Llama 4": families.llama4,
    "Mistral": lambda: families.mistral(window=8),
    "Gemma 3": families.gemma3,
    "gpt-oss": families.gpt_oss,
    "DeepSeek V3": families.deepseek,
    "experts of other numbers than ranks": lambda: families.made("Qwen3Moe", **EXPERTS),
    "divided when loaded": lambda: families.made("HrmText"),
    "joined when loaded": lambda: families.made("OlmoHybrid", **LINEAR),
    "more ranks than rows": lambda: families.made("Granite", vocab_size=2),
}
pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore:.torch.jit.script"),  # transformers' GPTBigCode
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with a model of each family, in bfloat16, in several files."""
    path = tmp_path_factory.mktemp("families")
    for name, made in FAMILIES.items():
        made().to(torch.bfloat16).save_pretrained(path / name, max_shard_size="8KB")
    return path


def whole(model: Any) -> dict[str, torch.Tensor]:
    """All parameters and buffers by name, gathered."""
    named = (*model.named_parameters(), *model.named_buffers())
    return {name: full_tensor(tensor.detach()) for name, tensor in named}


def filled(path: Path, mesh: Any = None) -> EmptyStudent:
    """With more than one rank sharded as a student is, whatever the family."""
    student = EmptyStudent(path)
    if mesh is not None:
        for block in blocks_of(student.model):
            fully_shard(block, mesh=mesh)
        fully_shard(student.model, mesh=mesh)
    student._weights.fill(CPU)
    return student


def loaded(path: Path) -> dict[str, torch.Tensor]:
    from transformers import AutoModelForCausalLM

    return whole(AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32))


def differences(ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor]) -> list[str]:
    if list(ours) != list(theirs):
        return sorted(ours.keys() ^ theirs.keys()) or ["order"]
    return [n for n in ours if ours[n].dtype != theirs[n].dtype or not ours[n].equal(theirs[n])]


@pytest.mark.parametrize("name", FAMILIES)
def test_one_rank_reads_what_transformers_loads(name: str, folder: Path) -> None:
    student = filled(folder / name)
    assert differences(whole(student.model), loaded(folder / name)) == []
    assert not any(map(is_sharded, student.model.parameters()))


@pytest.mark.parametrize("name", ["Qwen3", "Mixtral", "GPTBigCode"])
def test_a_student_takes_the_weights_that_engines_got_and_keeps_what_is_not_trained(
    name: str, folder: Path, tmp_path: Path
) -> None:
    torch.manual_seed(1)
    trained, other = filled(folder / name).model, filled(folder / name).model
    for parameter in trained.parameters():
        parameter.data = torch.randn_like(parameter)
    sent = dict(named_weights(trained, torch.bfloat16))
    still = next(key for key, one in other.named_parameters() if key in sent and one.ndim == 1)
    kept = other.get_parameter(still).detach().clone()
    del sent[still]
    save_file({key: one.contiguous() for key, one in sent.items()}, tmp_path / "model.safetensors")
    with pytest.raises(StageError, match=f"missing: {still}"):
        StoredWeights(other, tmp_path, whole=False)
    other.get_parameter(still).requires_grad_(False)
    StoredWeights(other, tmp_path, whole=False).refill()
    found = dict(named_weights(other, torch.float32))
    assert differences(found, {key: (sent | {still: kept})[key].float() for key in found}) == []


def test_a_part_of_the_weights_leaves_the_names_of_all_in_files(
    folder: Path, tmp_path: Path
) -> None:
    model = filled(folder / "Mixtral").model
    before = {key: one.contiguous() for key, one in named_weights(model, torch.float32)}
    sent = {key: one for key, one in before.items() if "experts" not in key}
    save_file(sent, tmp_path / "model.safetensors")
    for key, parameter in model.named_parameters():
        parameter.requires_grad_("experts" not in key)
    StoredWeights(model, tmp_path, whole=False).refill()
    assert dict(named_weights(model, torch.float32)).keys() == before.keys()


@pytest.fixture(scope="module", params=[2, 3])
def of_ranks(request: pytest.FixtureRequest, folder: Path) -> dict[str, Any]:
    """By family: names of what differs after a gather, and whether every part is a part."""

    def of_family(path: Path, mesh: Any) -> tuple[list[str], bool]:
        student = filled(path, mesh)
        parts = [own_part(p.detach()).numel() < p.numel() for p in student.model.parameters()]
        wrong = differences(whole(student.model), loaded(path))
        for parameter in student.model.parameters():
            own_part(parameter.detach()).zero_()
        StoredWeights(student.model, path, whole=False).refill()
        return wrong + differences(whole(student.model), loaded(path)), all(parts)

    def families_of(spec: RankSpec) -> dict[str, Any]:
        torch.set_num_threads(1)
        mesh = join_mesh(spec, CPU)
        return {name: of_family(folder / name, mesh) for name in FAMILIES}

    def lead(spec: RankSpec | None, _: RankGroup) -> dict[str, Any]:
        return families_of(spec)

    def follow(spec: RankSpec) -> Any:
        families_of(spec)

    found: dict[str, Any] = in_processes(request.param, lead, follow, 120)
    return found


@pytest.mark.parametrize("name", FAMILIES)
def test_ranks_together_read_what_transformers_loads(name: str, of_ranks: dict[str, Any]) -> None:
    wrong, parts = of_ranks[name]
    assert wrong == []
    assert parts or name == "more ranks than rows"


# ── files that do not fit ──────────────────────────────────────────────────────────────────────


@pytest.fixture
def stored(tmp_path: Path) -> tuple[Path, dict[str, torch.Tensor]]:
    """A model's directory, and its tensors, which the test may change and has to write."""
    tiny_model().save_pretrained(tmp_path)
    return tmp_path, load_file(tmp_path / "model.safetensors")


def refused(path: Path, tensors: dict[str, torch.Tensor], match: str) -> None:
    save_file(tensors, path / "model.safetensors")
    with pytest.raises(StageError, match=match):
        EmptyStudent(path)


UP = "mlp.up_proj.weight"


@pytest.mark.parametrize(
    ("name", "tensor", "reason"),
    [
        (f"model.layers.1.{UP}", None, f"missing: model.layers.1.{UP}"),
        (f"model.layers.2.{UP}", torch.zeros(2, 2), f"unknown to the model: model.layers.2.{UP}"),
        ("model.norm.weight", torch.zeros(31), r"shape: model.norm.weight \(31,\), not \(32,\)"),
    ],
)
def test_other_weights_are_refused(stored: Any, name: str, tensor: Any, reason: str) -> None:
    path, tensors = stored
    tensors.pop(name, None)
    refused(path, tensors if tensor is None else tensors | {name: tensor}, reason)


def test_experts_of_which_one_is_missing_are_refused(tmp_path: Path) -> None:
    families.mixtral().save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    del tensors["model.layers.0.block_sparse_moe.experts.1.w2.weight"]
    refused(tmp_path, tensors, r"of another shape: model\.layers\.0\.mlp\.experts\.down_proj \(3, ")


def test_other_tensors_are_ignored_and_a_weight_stored_twice_stays_tied(stored: Any) -> None:
    path, tensors = stored
    tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.zeros(8)
    save_file(tensors, path / "model.safetensors")
    assert differences(whole(filled(path).model), loaded(path)) == []
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
    save_file(tensors, path / "model.safetensors")
    model = filled(path).model
    assert model.lm_head.weight is model.model.embed_tokens.weight


def test_tied_weights_of_different_values_are_refused(stored: Any) -> None:
    path, tensors = stored
    tensors["lm_head.weight"] = 2 * tensors["model.embed_tokens.weight"]
    save_file(tensors, path / "model.safetensors")
    with pytest.raises(StageError, match="other values than the weight that config"):
        filled(path)


def test_a_file_that_is_cut_off_and_a_directory_without_one_are_refused(stored: Any) -> None:
    path, _ = stored
    file = path / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])
    with pytest.raises(StageError, match="they cannot be read"):
        EmptyStudent(path)
    file.rename(path / "adapter.safetensors")
    with pytest.raises(StageError, match=r"neither model\.safetensors nor"):
        EmptyStudent(path)


def test_a_model_is_saved_under_the_names_of_its_files(folder: Path, tmp_path: Path) -> None:
    source = folder / "Mixtral"
    filled(source).model.save_pretrained(tmp_path / "saved")
    names = []
    for path in (tmp_path / "saved", source):
        files = [safe_open(file, "pt") for file in path.glob("*.safetensors")]
        names.append(sorted(name for file in files for name in file.keys()))  # noqa: SIM118
    assert names[0] == names[1]
