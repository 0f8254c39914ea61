"""What a step reports of its devices: FLOP/s, their share of the peak, and GPU memory."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.flop_counter import FlopCounterMode

from async_opd.config.sections.train import TrainConfig
from tests.trainer.families import made
from tests.trainer.models import new_rank, random_sample, tiny_model
from trainer.batches.packing import pack
from trainer.learner import Learner
from trainer.losses import ForwardKL, Objective, OnTopK
from trainer.notes import drain_notes
from trainer.rank import BackwardResult
from trainer.rank_group import SINGLE_RANK, RankGroup, SingleRank
from trainer.student.loss_module import StudentLoss
from trainer.utilization import (
    MemoryUse,
    ModelSize,
    attended,
    memory_metrics,
    memory_use,
    peak_tflops,
    utilization,
)

CPU, CUDA = torch.device("cpu"), torch.device("cuda")
SIZES = [5, 1, 0, 9]


def metrics(rank_group: RankGroup = SINGLE_RANK, **train: Any) -> dict[str, float]:
    """Of one step over samples of 3 prompt tokens."""
    config = TrainConfig.model_validate({"warmup_steps": 0, **train})
    rank = new_rank(tiny_model(), config)
    samples = [random_sample(index, size, k=6) for index, size in enumerate(SIZES)]
    return Learner(rank, rank_group=rank_group).train_batch(samples).metrics


def test_a_model_whose_flops_are_unknown_trains_without_the_metric_and_says_so_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("trainer.utilization._attention", lambda settings: 1 // 0)
    drain_notes()
    rank = new_rank(tiny_model(), TrainConfig())
    reports = [Learner(rank).train_batch([random_sample(0, 5, k=6)]) for _ in range(2)]
    assert not any({"train/tflops", "train/mfu"} & set(one.metrics) for one in reports)
    (said,) = [one for report in reports for one in report.notes if "tflops" in one]
    assert "train/tflops and train/mfu are missing" in said
    assert "ZeroDivisionError" in said


def test_mfu_is_the_share_of_the_peak_of_the_config_and_a_cpu_has_no_gpu_memory() -> None:
    found, plain = metrics(peak_tflops=0.5), metrics()
    assert found["train/mfu"] == pytest.approx(found["train/tflops"] / 0.5)
    assert not [key for key in plain if "mfu" in key or "memory" in key]


def test_a_step_reports_the_flops_of_samples_with_a_response_by_rank() -> None:
    assert utilization(6e12, 2.0, 3, 4.0) == {"train/tflops": 1.0, "train/mfu": 0.25}
    found = metrics()
    some = [size for size in SIZES if size]
    expected = ModelSize.of(tiny_model()).training_flops([3 + size for size in some], some)
    assert found["train/tflops"] * found["train/compute_s"] * 1e12 == pytest.approx(expected)


@pytest.mark.parametrize(
    ("name", "peak"),
    [
        ("NVIDIA H100 80GB HBM3", 989.0),
        ("NVIDIA H100 PCIe", 756.0),
        ("NVIDIA H200", 989.0),
        ("NVIDIA H20", 148.0),
        ("NVIDIA A100-SXM4-80GB", 312.0),
        ("NVIDIA A10G", None),
        ("NVIDIA GH200 480GB", 989.0),
        ("NVIDIA L40S", 362.0),
        ("Tesla V100-SXM2-16GB", None),
    ],
)
def test_the_peak_of_a_gpu(name: str, peak: float | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: name)
    assert peak_tflops(CUDA, True, None) == peak


def test_a_given_peak_counts_before_that_of_bfloat16_which_no_other_precision_has() -> None:
    assert peak_tflops(CUDA, False, 12.0) == 12.0
    assert peak_tflops(CUDA, False, None) is None
    assert not [key for key in memory_metrics([MemoryUse(0, 0, 0)]) if "rank" in key]


class Statistics:
    """torch.cuda's statistics of a GPU with 80 GiB: tensors have 2 and had 3, torch has taken 5.

    70 GiB are free.
    """

    def __init__(self) -> None:
        self.resets: list[torch.device] = []

    def patch(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(torch.cuda, "memory_allocated", lambda _: 2 << 30)
        monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda _: 3 << 30)
        monkeypatch.setattr(torch.cuda, "memory_reserved", lambda _: 5 << 30)
        monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (70 << 30, 80 << 30))
        monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", self.resets.append)


def test_the_peak_of_memory_begins_anew_with_each_reading(monkeypatch: pytest.MonkeyPatch) -> None:
    statistics = Statistics()
    statistics.patch(monkeypatch)
    assert memory_use(CUDA) == MemoryUse(2 << 30, 3 << 30, outside=5 << 30)
    assert statistics.resets == [CUDA]


class SecondRank(SingleRank):
    """Two ranks, of which the second computes nothing and has a GPU."""

    ranks = 2

    def dispatch(self, method: str, arguments: Sequence[Any]) -> Callable[[], list[Any]]:
        results = {
            "backward": BackwardResult({}, 0.0),
            "apply": MemoryUse(1 << 30, 4 << 30, 1 << 30),
        }
        return lambda: [results.get(method)]


def test_a_step_reports_the_memory_of_every_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("trainer.rank.memory_use", lambda _: MemoryUse(2 << 30, 3 << 30, 2 << 30))
    found = metrics(SecondRank())
    assert {key: value for key, value in found.items() if "memory" in key} == {
        "train/gpu_memory_gib": 2.0,
        "train/gpu_memory_peak_gib": 4.0,
        "train/gpu_memory_outside_gib": 2.0,
        "train/rank/0/gpu_memory_gib": 2.0,
        "train/rank/0/gpu_memory_peak_gib": 3.0,
        "train/rank/0/gpu_memory_outside_gib": 2.0,
        "train/rank/1/gpu_memory_gib": 1.0,
        "train/rank/1/gpu_memory_peak_gib": 4.0,
        "train/rank/1/gpu_memory_outside_gib": 1.0,
    }


PROMPT, RESPONSES = 12, (20, 8)
LENGTHS = tuple(PROMPT + response for response in RESPONSES)


Shape = tuple[int, int]


def product(_: Shape, left: Shape, right: Shape, **others: Any) -> int:
    """FLOPs of ``addmm_``; flop_counter has no formula for it, which sums the head's gradient."""
    return 2 * left[0] * left[1] * right[1]


def counted(model: Any, responses: Sequence[int]) -> int:
    """FLOPs of the dispatched products of each sequence alone; eager attention computes all T²."""
    model.set_attn_implementation("eager")
    model.set_experts_implementation("eager")  # flop_counter does not know grouped products
    student = StudentLoss(model, Objective(OnTopK(ForwardKL(), "bucket", None)), {})
    counter = FlopCounterMode(display=False, custom_mapping={torch.ops.aten.addmm_: product})
    with counter:
        for index, response in enumerate(responses):
            loss, _ = student(pack([random_sample(index, response, k=6, prompt=PROMPT)]))
            loss.backward()
    return counter.get_total_flops()


def masked(size: ModelSize, lengths: Sequence[int]) -> int:
    """FLOPs of the pairs that eager attention computes and the mask then discards."""
    layers = zip(size.attention, size.windows, strict=True)
    return sum(6 * wide * (n * n - attended(n, window)) for wide, window in layers for n in lengths)


GEMMA4 = {
    "head_dim": 16,
    "global_head_dim": 32,
    "sliding_window": 7,
    "layer_types": ["sliding_attention", "full_attention"],
    "vocab_size_per_layer_input": 32,
    "hidden_size_per_layer_input": 8,
    "num_kv_shared_layers": 0,
}
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "tied": ("Qwen3", {"head_dim": 16, "tie_word_embeddings": True}),
    "untied": ("Qwen3", {"head_dim": 16, "tie_word_embeddings": False}),
    "biases": ("Llama", {"mlp_bias": True, "attention_bias": True}),
    "windows": ("Mistral", {"sliding_window": 7}),
    "windows of some layers": ("Gemma2", {"head_dim": 16, "sliding_window": 5}),
    "two experts of four": ("Mixtral", {"num_local_experts": 4, "num_experts_per_tok": 2}),
    "one expert of four": (
        "Qwen3Moe",
        {
            "head_dim": 16,
            "num_experts": 4,
            "num_experts_per_tok": 1,
            "moe_intermediate_size": 24,
            "decoder_sparse_step": 1,
        },
    ),
    "wider heads without windows": ("Gemma4", GEMMA4),
    "experts under another name": (
        "Gemma4",
        {
            **GEMMA4,
            "enable_moe_block": True,
            "num_experts": 4,
            "top_k_experts": 2,
            "moe_intermediate_size": 24,
        },
    ),
}


@pytest.mark.parametrize("family", FAMILIES)
def test_model_flops_are_the_dispatched_ones_without_masked_pairs(family: str) -> None:
    name, settings = FAMILIES[family]
    model = made(name, **settings)
    size = ModelSize.of(model)
    expected = counted(model, RESPONSES) - masked(size, LENGTHS)
    assert size.training_flops(LENGTHS, RESPONSES) == expected


@given(tokens=st.integers(0, 60), window=st.none() | st.integers(1, 70))
def test_attended_counts_the_pairs_of_a_causal_mask(tokens: int, window: int | None) -> None:
    reach = window or tokens
    pairs = [(i, j) for i in range(tokens) for j in range(i + 1) if i - j < reach]
    assert attended(tokens, window) == len(pairs)


def test_a_prompt_alone_costs_no_head() -> None:
    size = ModelSize(decoder=100, head=7, attention=(3,), windows=(None,))
    assert size.training_flops([4], [0]) == 6 * (100 * 4 + 3 * 10)
    assert size.training_flops([4], [2]) - size.training_flops([4], [0]) == 6 * 7 * 2


def test_a_frozen_matrix_costs_two_thirds_and_an_unknown_model_its_tokens() -> None:
    model = made("Qwen3", head_dim=16)
    full = ModelSize.of(model)
    model.requires_grad_(False)
    frozen = ModelSize.of(model)
    assert frozen.decoder == pytest.approx(full.decoder * 2 / 3, rel=1e-3)
    assert frozen.head == full.head * 2 // 3
    model.config = Refusing()
    size = ModelSize.of(model)
    assert size.unknown == "RuntimeError: 'head_dim' is a per-layer attribute"
    assert size.training_flops([8], [4]) == 2 * size.training_flops([4], [4]) > 0


class Refusing:
    """A config that cannot be read."""

    def get_text_config(self) -> Any:
        raise RuntimeError("'head_dim' is a per-layer attribute")
