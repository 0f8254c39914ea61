"""VLM students, samples with images, and what transformers computes of each alone."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from io import BytesIO
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import numpy as np
import torch

from async_opd.config.sections.train import TrainConfig
from async_opd.core.row import Media
from async_opd.core.samples import Prompt, Rollout, Sample, VersionSpan
from async_opd.core.scores import TopK
from async_opd.models.processor import ImageProcessor
from tests.vision_models import FAMILIES, SIZE, TOKENS
from trainer.batches.micro_batches import MicroBatch
from trainer.batches.token_weights import TokenWeight
from trainer.losses import ForwardKL, Objective, OnTopK
from trainer.rank import Rank
from trainer.student.attention_choice import Platform
from trainer.student.loading import EmptyStudent, set_attention
from trainer.student.placed import PlacedStudent
from trainer.vision.images import Sight

CPU = torch.device("cpu")
SIZES = [(56, 84), (112, 56), (84, 84)]
VISION_START, VISION_END = TOKENS.index("<|vision_start|>"), TOKENS.index("<|vision_end|>")


@cache
def folder_of(family: str) -> Path:
    """A saved tiny model of the family, made once in a process."""
    return FAMILIES[family](Path(mkdtemp()) / family)


@cache
def processor_of(family: str) -> ImageProcessor:
    return ImageProcessor.load(str(folder_of(family)))


def student_of(family: str) -> Any:
    """The student as a run builds it, filled, with the attention of a CPU."""
    torch.set_num_threads(1)
    empty = EmptyStudent(folder_of(family))
    empty.fill(CPU)
    model = empty.whole()
    set_attention(model, "auto", Platform(device="cpu"))
    return model


@cache
def image(number: int) -> bytes:
    """An encoded image of random colors; its size goes by its number."""
    from PIL import Image

    width, height = SIZES[number % len(SIZES)]
    colors = np.random.default_rng(number).integers(0, 256, (height, width, 3), dtype=np.uint8)
    made = BytesIO()
    Image.fromarray(colors).save(made, "PNG")
    return made.getvalue()


@dataclass(frozen=True)
class Seen:
    """Samples, and the encoded images that they show, by SHA-256."""

    samples: tuple[Sample, ...]
    encoded: dict[str, bytes]

    def micro_batch(self) -> MicroBatch:
        weights = tuple(TokenWeight() for _ in self.samples)
        return MicroBatch(self.samples, weights, images=self.encoded)


def seen(family: str, *images: Sequence[int], response: int = 5) -> Seen:
    """A sample for each sequence of image numbers, which its prompt shows in this order."""
    made, encoded = [], {}
    for index, numbers in enumerate(images):
        found = [image(number) for number in numbers]
        encoded |= {hashlib.sha256(one).hexdigest(): one for one in found}
        made.append(_sample(family, index, found, response + index))
    return Seen(tuple(made), encoded)


def _sample(family: str, index: int, images: Sequence[bytes], response: int) -> Sample:
    random = np.random.default_rng(50 + index)
    processor = processor_of(family)
    letters = lambda count: random.integers(20, 100, count).tolist()  # noqa: E731
    short = letters(3)
    for _ in images:
        short += [VISION_START, processor.placeholder_id, VISION_END, *letters(2)]
    short = np.asarray(short, dtype=np.int32)
    media = tuple(Media(hashlib.sha256(one).hexdigest(), len(one), *SIZES[0]) for one in images)
    prompt = Prompt(f"p{index}", "s", "t", processor.expand(short, images), media=media)
    ids = np.asarray(letters(response), np.int32)
    table = torch.from_numpy(random.standard_normal((response, SIZE))).log_softmax(-1)
    best = table.topk(6, dim=-1)
    own = table.numpy()[np.arange(response), ids].astype(np.float32)
    rest = table.scatter(-1, best.indices, -torch.inf).logsumexp(-1).float().numpy()
    scores = TopK(best.indices.int().numpy(), best.values.float().numpy(), own, rest)
    logprobs = random.standard_normal(response).astype(np.float32)
    rollout = Rollout.plain(
        f"p{index}/0", prompt, ids, logprobs, (VersionSpan(0, 0, response),), "stop"
    )
    return Sample(rollout, scores)


def rank_of(model: Any, family: str, mesh: Any = None, **train: Any) -> Rank:
    """A rank that trains the model on a forward KL; of a mesh, one of its ranks."""
    objective = Objective(OnTopK(ForwardKL(), "ignore", None))
    settings = TrainConfig(max_grad_norm=1e9, **train)
    placed = PlacedStudent(model, objective, settings, CPU, mesh=mesh)
    placed.sight = Sight(lambda: processor_of(family), model.base_model, CPU, placed.ranks)
    return Rank(placed)


def exact_model(family: str) -> Any:
    """The whole model as transformers loads it, with eager attention."""
    from transformers import AutoModelForImageTextToText

    return AutoModelForImageTextToText.from_pretrained(
        folder_of(family), dtype=torch.float32, attn_implementation="eager"
    ).eval()


def exact_logits(model: Any, family: str, sample: Sample, encoded: dict[str, bytes]) -> Any:
    """Of the rows that predict the response [R, V]: the sample alone, transformers' positions."""
    rollout, processor = sample.rollout, processor_of(family)
    ids = torch.from_numpy(rollout.token_ids).long()[None]
    given: dict[str, Any] = {"input_ids": ids}
    if rollout.prompt.media:
        given |= processor.inputs([encoded[one.sha256] for one in rollout.prompt.media])
        if hasattr(model.base_model, "get_rope_index"):
            given["mm_token_type_ids"] = (ids == processor.placeholder_id).int()
    first = len(rollout.prompt.token_ids) - 1
    return model(**given, use_cache=False).logits[0, first:-1]


def exact_gradient(family: str, data: Seen) -> dict[str, torch.Tensor]:
    """Autograd through the whole model, one sample at a time, by parameter."""
    model = exact_model(family)
    loss = torch.zeros(())
    for sample in data.samples:
        log_q = exact_logits(model, family, sample, data.encoded).log_softmax(-1)
        log_p = torch.from_numpy(sample.scores.logprobs)
        log_q = log_q.gather(-1, torch.from_numpy(sample.scores.ids).long())
        loss = loss + (log_p.exp() * (log_p - log_q)).sum()
    loss.backward()
    return gradients(model)


def gradients(model: Any) -> dict[str, torch.Tensor]:
    return {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
