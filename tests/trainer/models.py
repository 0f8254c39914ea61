"""A tiny random Qwen3 model, ranks and random samples for the trainer's tests."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from async_opd.config.run_config import RunConfig
from async_opd.config.sections.loss import ForwardKLConfig
from async_opd.config.sections.train import TrainConfig
from async_opd.core.samples import Header, Prompt, Rollout, Sample, VersionSpan
from async_opd.core.scores import SampledLogprobs, Scores, TopK
from trainer.losses import build_objective
from trainer.rank import Rank
from trainer.student.loading import empty_student, fill_student
from trainer.student.placed import PlacedStudent
from trainer.student.sharding import full_tensor

VOCABULARY = 32


def tiny_model(seed: int = 0, **sizes: Any) -> Any:
    """Two layers, tied embeddings, float32; with other ``sizes`` of its config."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.set_num_threads(1)
    torch.manual_seed(seed)
    usual = {
        "vocab_size": VOCABULARY,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 16,
        "max_position_embeddings": 64,
        "tie_word_embeddings": True,
        "attn_implementation": "sdpa",
    }
    return Qwen3ForCausalLM(Qwen3Config(**usual | sizes))


def new_rank(model: Any, train: TrainConfig, **more: Any) -> Rank:
    """A rank on the CPU that trains by forward KL over the teacher's top-k."""
    return Rank(
        PlacedStudent(model, build_objective(ForwardKLConfig()), train, torch.device("cpu"), **more)
    )


def kept_gradients(rank: Rank) -> dict[str, torch.Tensor]:
    """The full gradients of the rank's last step, as its optimizer gets them: filled by it.

    Of several ranks each gathers them: all need it.
    """
    kept: dict[str, torch.Tensor] = {}

    def keep(*_: Any) -> None:
        named = {n: p.grad for n, p in rank.model.named_parameters() if p.grad is not None}
        kept.update({name: full_tensor(grad).clone() for name, grad in named.items()})

    rank.optimizer.register_step_pre_hook(keep)
    return kept


def headers_of(samples: Sequence[Sample]) -> list[Header]:
    """The headers of samples."""
    return [sample.header for sample in samples]


def random_sample(index: int, response: int, k: int = 0, prompt: int = 3) -> Sample:
    """A sample with random tokens and a random teacher; ``k`` 0 gives sampled-token scores."""
    random = np.random.default_rng(1000 + index)
    ids = random.integers(0, VOCABULARY, response, dtype=np.int32)
    table = torch.from_numpy(random.standard_normal((response, VOCABULARY))).log_softmax(-1)
    own = table.numpy()[np.arange(response), ids].astype(np.float32)
    scores: Scores = SampledLogprobs(own)
    if k:
        best = table.reshape(response, VOCABULARY).topk(k, dim=-1)
        rest = table.scatter(-1, best.indices, -torch.inf).logsumexp(-1).float().numpy()
        scores = TopK(best.indices.int().numpy(), best.values.float().numpy(), own, rest)
    spans = (VersionSpan(0, 0, response),) if response else ()
    rollout = Rollout.plain(
        uid=f"p{index}/0",
        prompt=Prompt(
            f"p{index}", "s", "t", random.integers(0, VOCABULARY, prompt, dtype=np.int32)
        ),
        response_ids=ids,
        rollout_logprobs=random.standard_normal(response).astype(np.float32),
        version_spans=spans,
        finish_reason="stop",
    )
    return Sample(rollout, scores)


def load_student(config: RunConfig, device: torch.device) -> Any:
    """The whole model in float32 on the device, in eval mode, with the attention that trains."""
    return fill_student(empty_student(config, device), config, device)


def samples_of(*sizes: int, k: int = 6, first: int = 0) -> list[Sample]:
    """Random samples with responses of these sizes."""
    return [random_sample(first + index, size, k=k) for index, size in enumerate(sizes)]


def bare_stage(learner: Any, batcher: Any = None, publisher: Any = None, **parts: Any) -> Any:
    """A training stage of these parts."""
    from trainer.stage import TrainerStage

    given = {"max_version_lag": None, "model_dir": "", **parts}
    return TrainerStage(learner, publisher, batcher, **given)
