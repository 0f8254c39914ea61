"""Which parameters are which sent tensors: learned from digests, and held to from then on."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from async_opd.weight_sync import parameters
from async_opd.weight_sync.digests import Digests, joined
from async_opd.weight_sync.parameters import (
    PACKED,
    QUANTIZED,
    LearnedParameters,
    SentTensors,
    UnlearnedMatrices,
)

Q, K, V, OUT = (f"l.0.attn.{name}_proj.weight" for name in "qkvo")
QKV = "l.0.attn.qkv_proj.weight"


def digests(**tensors: torch.Tensor) -> dict[str, str]:
    found = Digests(torch)
    for name, tensor in tensors.items():
        found.add(name, tensor)
    return found.values()


def weights(seed: int) -> dict[str, torch.Tensor]:
    """Of an attention layer; query has more heads than key and value."""
    draw = torch.Generator().manual_seed(seed)
    rows = {Q: 8, K: 4, V: 4, OUT: 8}
    return {name: torch.randn(count, 6, generator=draw) for name, count in rows.items()}


def fused(sent: dict[str, torch.Tensor]) -> torch.Tensor:
    return torch.cat([sent[Q], sent[K], sent[V]])


@given(
    rows=st.lists(st.integers(1, 5), min_size=1, max_size=4),
    width=st.sampled_from([(), (2,), (3, 4)]),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
)
def test_the_digest_of_joined_tensors_follows_from_those_of_the_parts(
    rows: list[int], width: tuple[int, ...], dtype: torch.dtype
) -> None:
    parts = [torch.randn(count * 2, *width).to(dtype) for count in rows]
    found = digests(**{str(i): part for i, part in enumerate(parts)})
    assert joined(list(found.values())) == digests(whole=torch.cat(parts))["whole"]


def test_parts_that_do_not_fit_or_end_within_a_word_have_no_joined_digest() -> None:
    found = digests(a=torch.ones(2, 3), b=torch.ones(2, 4), c=torch.ones(2, 3).half())
    assert joined([found["a"], found["b"]]) is None
    assert joined([found["a"], found["c"]]) is None
    odd = digests(a=torch.ones(3, dtype=torch.bfloat16))["a"]
    assert joined([odd, odd]) is None


@pytest.mark.parametrize("prefix", ["", PACKED])
def test_a_joined_parameter_has_to_follow_its_tensors(prefix: str) -> None:
    learned, first, later = LearnedParameters(), weights(0), weights(1)
    place = (0, prefix + QKV)
    learned.learn({place: digests(w=fused(first))["w"]}, SentTensors(digests(**first)))
    assert learned.sources == {place: (Q, K, V)}
    now = {place: digests(w=fused(later))["w"]}
    assert learned.wrong(now, digests(**later)) == []
    half = fused(later | {K: first[K]})
    assert learned.wrong({place: digests(w=half)["w"]}, digests(**later)) == [prefix + QKV]


@pytest.mark.parametrize("prefix", ["", PACKED])
def test_one_expert_of_a_layer_that_stayed_is_found(prefix: str) -> None:
    """Engines keep all experts of a layer as the trainer has them, under a separate name."""
    name = "l.0.mlp.experts.*.gate_proj.weight+up_proj.weight"
    place = (0, f"{prefix}l.0.mlp.experts.routed_experts.w13_weight")
    first, later = torch.randn(4, 6, 5), torch.randn(4, 6, 5)
    learned = LearnedParameters()
    learned.learn({place: digests(w=first)["w"]}, SentTensors(digests(**{name: first})))
    assert learned.sources == {place: (name,)}
    sent = digests(**{name: later})
    assert learned.wrong({place: digests(w=later)["w"]}, sent) == []
    stale = later.clone()
    stale[2, :3] = first[2, :3]
    assert learned.wrong({place: digests(w=stale)["w"]}, sent) == [place[1]]


def test_divided_experts_have_to_change_with_what_is_sent_for_their_module() -> None:
    """Those of one worker of several, of which none is a sent tensor."""
    name = "l.0.mlp.experts.*.gate_proj.weight+up_proj.weight"
    first, later = (SentTensors(digests(**{name: torch.randn(4, 6, 5)})) for _ in range(2))
    for module in ("l.0.mlp.experts", "l.0.mlp.experts.routed_experts"):
        assert later.changed(f"{module}.w13_weight", set(), first)
        assert not later.changed(f"{module}.w13_weight", set(), later)


def test_a_parameter_that_is_gone_or_whose_tensor_is_not_sent_is_wrong() -> None:
    learned, sent = LearnedParameters(), weights(0)
    found = {(0, OUT): digests(w=sent[OUT])["w"]}
    learned.learn(found, SentTensors(digests(**sent)))
    assert learned.wrong({}, digests(**sent)) == [OUT]
    del sent[OUT]
    assert learned.wrong(found, digests(**sent)) == [OUT]


def test_a_tied_head_is_learned_from_the_embedding_but_no_tensor_sent_under_its_name() -> None:
    learned = LearnedParameters()
    sent = digests(**{"embed.weight": torch.ones(4, 2), "norm.weight": torch.ones(2)})
    learned.learn({(0, f"{PACKED}head.weight"): sent["embed.weight"]}, SentTensors(sent))
    assert learned.sources == {(0, f"{PACKED}head.weight"): ("embed.weight",)}
    learned = LearnedParameters()
    sent = digests(**{"a.norm.weight": torch.ones(4), "b.norm.weight": torch.zeros(4)})
    learned.learn({(0, "a.norm.weight"): sent["b.norm.weight"]}, SentTensors(sent))
    assert learned.sources == {}


def test_equal_tensors_explain_a_parameter_twice_and_it_is_learned_later() -> None:
    """The biases of a new model are all zero: their order in the joined one is unknown."""
    learned = LearnedParameters()
    zeros = {f"a.{name}.bias": torch.zeros(4) for name in "qkv"}
    place = (0, "a.qkv.bias")
    learned.learn({place: digests(w=torch.zeros(12))["w"]}, SentTensors(digests(**zeros)))
    assert learned.sources == {}
    trained = {name: torch.randn(4) for name in zeros}
    found = digests(w=torch.cat(list(trained.values())))["w"]
    learned.learn({place: found}, SentTensors(digests(**trained)))
    assert learned.sources == {place: tuple(zeros)}


def test_joined_tensors_are_not_looked_for_among_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    """A hundred tensors have a million permutations of three."""
    tried: list[object] = []
    monkeypatch.setattr(parameters, "joined", tried.append)
    sent = SentTensors({f"layers.{i}.weight": f"float32[4, 4]:{i}" for i in range(100)})
    LearnedParameters().learn({(0, "layers.fused.weight"): "float32[8, 4]:x"}, sent)
    assert tried == []


def of_student(step: int) -> dict[str, torch.Tensor]:
    """A student with a frozen tower sends all else, under the names of its checkpoint."""
    draw = torch.Generator().manual_seed(step)
    return {
        "model.language_model.layers.0.mlp.down_proj.weight": torch.randn(4, 6, generator=draw),
        "model.visual.merger.norm.weight": torch.ones(6) + step,
    }


TOWER = {
    "visual.patch_embed.proj.weight": torch.ones(2, 3),
    "visual.blocks.0.attn.qkv_proj.weight": torch.ones(9, 3),
    "visual.blocks.0.norm1.weight": torch.ones(6),
}
"""An engine's, which joins matrices and has another name for the outermost module."""
FROZEN = (
    "model.visual.patch_embed.proj.weight",
    *(f"model.visual.blocks.0.attn.{one}_proj.weight" for one in "qkv"),
    "model.visual.blocks.0.norm1.weight",
)


@pytest.mark.parametrize("frozen", [FROZEN, ()], ids=["frozen", "trained"])
def test_a_tower_has_to_change_unless_it_is_frozen(frozen: tuple[str, ...]) -> None:
    first, later = (SentTensors(digests(**of_student(step)), frozen) for step in (0, 1))
    matrices = {(0, name): digest for name, digest in digests(**TOWER).items() if "," in digest}
    unlearned = UnlearnedMatrices()
    unlearned.remember(0, matrices, first)
    kept = unlearned.kept(0, matrices, later, set(TOWER))
    assert kept == ([] if frozen else sorted(name for _, name in matrices))


def test_a_norm_of_a_frozen_tower_is_not_learned_from_a_sent_one_that_is_equal() -> None:
    learned, place = LearnedParameters(), (0, "visual.blocks.0.norm1.weight")
    learned.learn(
        {place: digests(w=torch.ones(6))["w"]}, SentTensors(digests(**of_student(0)), FROZEN)
    )
    assert learned.sources == {}


@pytest.mark.parametrize(
    "name", ["visual.merger.norm.weight", "language_model.model.layers.0.mlp.down_proj.weight"]
)
def test_what_is_sent_beside_a_frozen_tower_is_not_frozen(name: str) -> None:
    assert not SentTensors(digests(**of_student(0)), FROZEN).frozen(name)
    sent = SentTensors({}, ["visual.blocks.0.mlp.fc1.weight"])
    assert sent.frozen("model.visual.blocks.0.mlp.fc1.weight")


def test_under_other_names_of_modules_every_matrix_has_to_be_another() -> None:
    first = SentTensors(
        {"l.q": "float32[4, 4]:1", "l.k": "float32[4, 4]:2", "l.norm": "float32[4]"}
    )
    some = SentTensors(dict(first.digests) | {"l.q": "float32[4, 4]:3"})
    both = SentTensors(dict(some.digests) | {"l.k": "float32[4, 4]:4"})
    assert not some.changed("engine.block.qk", set(), first)
    assert both.changed("engine.block.qk", set(), first)


# ── engines that quantize ──────────────────────────────────────────────────────────────────────


def float8(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """What an engine makes of the tensors, each alone."""
    numbers = {name: one.to(torch.float8_e4m3fn) for name, one in tensors.items()}
    return numbers | {f"{name}_scale": one.amax(1, keepdim=True) for name, one in tensors.items()}


def also_quantized(tensors: dict[str, torch.Tensor]) -> SentTensors:
    made = digests(**{QUANTIZED + name: one for name, one in float8(tensors).items()})
    return SentTensors(digests(**tensors) | made)


def kept(tensors: dict[str, torch.Tensor]) -> dict[tuple[int, str], str]:
    """The parameters of a quantized engine."""
    made = float8(tensors)
    parts = {QKV + end: torch.cat([made[n + end] for n in (Q, K, V)]) for end in ("", "_scale")}
    parts |= {OUT + end: made[OUT + end] for end in ("", "_scale")}
    return {(0, name): digest for name, digest in digests(**parts).items()}


def wide(seed: int) -> dict[str, torch.Tensor]:
    """``weights`` whose rows are whole words in float8."""
    return {name: torch.cat([one, one[:, :2]], 1) for name, one in weights(seed).items()}


def test_quantized_numbers_and_scales_are_learned_and_have_to_follow() -> None:
    learned, later = LearnedParameters(), wide(1)
    assert learned.learn(kept(wide(0)), also_quantized(wide(0))) == []
    assert set(learned.sources) == {(0, n + end) for n in (QKV, OUT) for end in ("", "_scale")}
    sent = also_quantized(later).digests
    assert learned.wrong(kept(later), sent) == []
    assert learned.wrong(kept(later | {K: wide(0)[K]}), sent) == [QKV, f"{QKV}_scale"]


@pytest.mark.parametrize("end", ["", "_scale"])
def test_a_quantized_parameter_that_nothing_explains_is_returned_at_once(end: str) -> None:
    found = kept(wide(0)) | {(0, OUT + end): kept(wide(1))[0, OUT + end]}
    learned = LearnedParameters()
    assert learned.learn(found, also_quantized(wide(0))) == [OUT + end]


def test_without_quantized_digests_nothing_has_to_be_explained() -> None:
    assert LearnedParameters().learn(kept(wide(0)), SentTensors(digests(**wide(0)))) == []


def test_a_quantized_matrix_of_a_frozen_tower_needs_no_explanation() -> None:
    sent = SentTensors(also_quantized(wide(0)).digests, ("model.visual.blocks.0.proj.weight",))
    tower = {(0, "visual.blocks.0.proj.weight"): kept(wide(1))[0, OUT]}
    assert LearnedParameters().learn(tower, sent) == []
