"""Students with the shapes of Qwen3 and random weights, and samples for them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from async_opd.core.samples import Prompt, Rollout, Sample, VersionSpan
from async_opd.core.scores import TopK
from async_opd.core.uid import Uid, rollout_uid
from async_opd.models import torchvision_operators
from trainer.batches.micro_batches import MicroBatch
from trainer.batches.token_weights import TokenWeight
from trainer.losses.kl import ForwardKL
from trainer.losses.objective import Objective
from trainer.losses.terms import OnTopK
from trainer.rank import Rank
from trainer.student.placed import PlacedStudent

TOP_K = 64
OBJECTIVE = Objective(OnTopK(ForwardKL(), "bucket", None))

SHAPES: dict[str, dict[str, Any]] = {
    "qwen3-0.6b": {
        "hidden_size": 1024,
        "intermediate_size": 3072,
        "num_hidden_layers": 28,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
    },
    "qwen3-4b": {
        "hidden_size": 2560,
        "intermediate_size": 9728,
        "num_hidden_layers": 36,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
    },
    "tiny": {
        "vocab_size": 512,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 32,
    },
}
"""Of the configs that Qwen published; ``tiny`` is for the CPU."""

COMMON: dict[str, Any] = {
    "vocab_size": 151_936,
    "head_dim": 128,
    "max_position_embeddings": 40_960,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": True,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e6},
}


@dataclass
class TrainSettings:
    """The fields of ``TrainConfig`` (``config/sections/train.py``), without pydantic."""

    steps: int = 200
    epochs: float | None = None
    batch_size: int = 128
    lr: float = 1e-5
    schedule: str = "cosine"
    min_lr_ratio: float = 0.1
    warmup_steps: int = 10
    weight_decay: float = 0.0
    betas: tuple[float, float] = (0.9, 0.95)
    max_grad_norm: float = 1.0
    on_nonfinite: str = "stop"
    max_skipped: int = 3
    tokens_per_micro_batch: int = 16384
    dtype: str = "auto"
    attention: str = "auto"
    moments: str = "float32"
    offload: str = "none"
    gradient_checkpointing: str = "auto"
    ranks: int = 1
    reduce_gradients: str = "auto"
    threads: int | str = "auto"
    peak_tflops: float | None = None
    freeze: list[str] = field(default_factory=list)
    lora: Any = None
    routing: str = "own"
    compile: bool = False
    replicate: int = 1
    context_parallel: int = 1
    export_dtype: str = "auto"


def student(shape: str, device: torch.device) -> Any:
    """A model with random float32 weights, made on the device, in eval mode."""
    torchvision_operators.install()  # in the processes of further ranks nothing else has
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(0)
    config = Qwen3Config(**{**COMMON, **SHAPES[shape]})
    with device:
        return Qwen3ForCausalLM(config).eval()


def rank_of(
    model: Any, device: torch.device, mesh: Any = None, train: TrainSettings | None = None
) -> Rank:
    """A rank that trains the model, with the default settings if none are given."""
    settings: Any = train or TrainSettings()
    wire = torch.bfloat16 if device.type == "cuda" else torch.float32
    return Rank(PlacedStudent(model, OBJECTIVE, settings, device, mesh=mesh), wire)


def samples(vocabulary: int, lengths: Sequence[int], seed: int = 0) -> list[Sample]:
    """One sample for each length in tokens, an eighth of it prompt, with scores of the top 64."""
    draw = np.random.default_rng(seed)
    return [_sample(draw, vocabulary, index, length) for index, length in enumerate(lengths)]


def micro_batch(rank: Rank, lengths: Sequence[int]) -> MicroBatch:
    """Samples of these lengths, whose loss is the mean over all of their tokens."""
    batch = samples(rank.student.vocabularies.student, lengths)
    return MicroBatch(tuple(batch), (TokenWeight(1 / sum(lengths)),) * len(batch))


def _sample(draw: np.random.Generator, vocabulary: int, index: int, length: int) -> Sample:
    asked = max(length // 8, 1)
    answered = length - asked
    tokens = draw.integers(0, vocabulary, length, dtype=np.int32)
    prompt = Prompt(Uid(f"p{index}"), "s", "t", tokens[:asked])
    steps = np.arange(TOP_K, dtype=np.int64) * (vocabulary // TOP_K)  # distinct in each row
    support = (draw.integers(0, vocabulary, (answered, 1)) + steps) % vocabulary
    logits = np.sort(draw.standard_normal((answered, TOP_K)), axis=1)[:, ::-1]
    best = logits - np.log(np.exp(logits).sum(1, keepdims=True)) + np.log(0.9)
    own = np.full(answered, -8.0, dtype=np.float32)
    rollout = Rollout.plain(
        uid=rollout_uid(prompt.uid, 0),
        prompt=prompt,
        response_ids=tokens[asked:],
        rollout_logprobs=own,
        version_spans=(VersionSpan(0, 0, answered),),
        finish_reason="stop",
    )
    return Sample(rollout, TopK(support.astype(np.int32), best.astype(np.float32), own))
