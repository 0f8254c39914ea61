"""An engine of a Gemma 3 with random weights, by ``teachers.replica``, on prompts with images.

text_nats    largest distance of a log-probability from that of transformers, both in float32
image_nats   the same behind images. On a CPU it is about 1: vLLM hides later tokens of an image
             from earlier ones there
kept_gib     host memory of the replica's process after all images, above that before them;
             ``most_gib``: the most meanwhile, with the images of requests in flight
cache_gib    what ``async_opd.memory.pools`` plans there for images
kept_share   of the plan; ``most_share``: of that and 12 bytes a pixel of all images at once
taken_gib    GPU memory after all images, above that before the engine
planned_gib  the engine's share of the GPU, and what the plan has there outside of it
taken_share  of the plan
"""

from __future__ import annotations

import asyncio
import gc
import hashlib
import os
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import torch

from async_opd.checks.gpu_memory import beside
from async_opd.config.load import load_config
from async_opd.core.batch import Batch, unpack
from async_opd.core.row import Media
from async_opd.core.samples import Rollout, Sample
from async_opd.media.cache import MediaCache
from async_opd.media.engine_prompts import PIXEL_BYTES
from async_opd.memory.pools import Machine, memory_of, outside
from async_opd.models.engine_args import Device, engine_env, fitted, smallest_gpu
from async_opd.models.processor import ImageProcessor
from async_opd.processes.own_settings import give_back_large_blocks
from async_opd.tools.first_steps.command import CONFIG, packaged
from async_opd.tools.qualify.measurements.measuring import (
    GIB,
    Figures,
    Report,
    used_gib,
    without_trainers_allocator,
)
from async_opd.tools.qualify.measurements.students import samples
from async_opd.tools.qualify.measurements.vision import gemma

OF_4B: tuple[dict[str, Any], dict[str, Any], int] = (
    {
        "vocab_size": 262_208,
        "hidden_size": 2560,
        "intermediate_size": 10_240,
        "num_hidden_layers": 6,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 256,
        "query_pre_attn_scalar": 256,
        "sliding_window": 1024,
        "layer_types": ["sliding_attention"] * 5 + ["full_attention"],
    },
    {
        "hidden_size": 1152,
        "intermediate_size": 4304,
        "num_hidden_layers": 27,
        "num_attention_heads": 16,
        "image_size": 896,
        "patch_size": 14,
    },
    256,
)
"""Decoder, tower and tokens of an image of Gemma 3 4B, but 6 layers in place of 34."""
OF_A_CPU = (gemma.TEXT, {**gemma.TOWER, "image_size": 896, "patch_size": 112}, 16)
"""The same pixels."""
SIZES = {"cuda": (OF_4B, 128), "cpu": (OF_A_CPU, 64)}
"""The model, and the images that are scored: more than an engine's process keeps."""
EACH, SIDE = 2, 1280
"""Images of a prompt; pixels of each one's side: the heap gives such blocks back."""
WATCH_S = 0.05
TOKENS = 48
"""Of a prompt and its answer, beside images."""
ORDINARY = 32
"""Token ids below are special ones."""


@dataclass(frozen=True)
class Teacher:
    """A model in place of the quickstart's teacher ``sort``, with further ``overrides``."""

    model: Path
    device: Device
    overrides: Sequence[str] = ()
    name = "teachers.sort"

    @property
    def config(self) -> Any:
        """Of a run with it."""
        own = {"model": self.model, "engine.max_model_len": 1024}
        given = [f"{self.name}.{key}={value}" for key, value in own.items()]
        overrides = [f"data.max_images={EACH}", *given, *self.overrides]
        return load_config(str(packaged() / CONFIG), overrides)

    @property
    def spec(self) -> Any:
        """Of its replica in a run."""
        from teachers.spec import TeacherEngineSpec

        config = self.config
        free = beside(config, self.name) if self.device == "cuda" else None
        return TeacherEngineSpec.of(config, self.device, (1,), self.name, "sort", free)


def noise(seed: int) -> bytes:
    """An image of random pixels, encoded without compression."""
    from PIL import Image

    pixels = np.random.default_rng(seed).integers(0, 256, (SIDE, SIDE, 3), dtype=np.uint8)
    file = BytesIO()
    Image.fromarray(pixels).save(file, "PNG", compress_level=0)
    return file.getvalue()


def rollouts(placeholder: int, images: Sequence[bytes], each: int) -> list[Rollout]:
    """A prompt for every two images, with the first ``each`` of them, and an answer."""
    media = [Media(hashlib.sha256(one).hexdigest(), len(one), SIDE, SIDE) for one in images]
    texts = samples(64, [TOKENS] * (len(images) // EACH))
    found = []
    for number, one in enumerate(text.rollout for text in texts):
        own = tuple(media[EACH * number :][:each])
        ids = np.concatenate([[placeholder] * each, one.prompt.token_ids + ORDINARY])
        prompt = replace(one.prompt, token_ids=ids.astype(np.int32), media=own)
        sampled = one.response_ids + ORDINARY, one.rollout_logprobs, one.version_spans
        found.append(Rollout.plain(one.uid, prompt, *sampled, "stop"))
    return found


def replica(spec: Any, images: Sequence[bytes], cache_bytes: int) -> Any:
    """It gets a copy of each image, as from a queue."""
    from teachers.replica import TeacherReplica

    encoded = {hashlib.sha256(one).hexdigest(): one for one in images}

    async def fetch(hashes: Sequence[str]) -> Mapping[str, bytes]:
        return {one: bytes(bytearray(encoded[one])) for one in hashes}

    return TeacherReplica(spec, MediaCache(fetch, cache_bytes))


async def scored(engine: Any, asked: Sequence[Rollout]) -> list[Sample]:
    """All at once."""
    return unpack(Sample, [await engine.score(Batch.pack(list(asked)))])


def expected(model: Any, processor: ImageProcessor, one: Rollout, images: Sequence[bytes]) -> Any:
    """Log-probabilities of a rollout's answer in transformers."""
    ids = processor.expand(one.prompt.token_ids, images)
    tokens = torch.from_numpy(np.concatenate([ids, one.response_ids])).long()[None]
    inputs: dict[str, Any] = {**processor.inputs(images)}
    if images:
        inputs["token_type_ids"] = (tokens == model.config.image_token_id).int()
    with torch.no_grad():
        logits = model(input_ids=tokens, **inputs).logits[0, len(ids) - 1 : -1].double()
    return logits.log_softmax(-1).gather(1, tokens[0, len(ids) :, None])[:, 0].numpy()


async def agreement(model: Path, device: Device) -> Figures:
    """Of a tiny model with transformers on the CPU."""
    from transformers import AutoModelForImageTextToText

    reference = AutoModelForImageTextToText.from_pretrained(model, dtype=torch.float32).eval()
    processor, images = ImageProcessor.load(str(model)), [noise(seed) for seed in range(4)]
    spec = Teacher(model, device, ["teachers.sort.engine.dtype=float32"]).spec
    engine = replica(replace(spec, kind="sampled", top_k=0), images, 0)
    found = {}
    try:
        await engine.ready()
        for name, each in (("text_nats", 0), ("image_nats", EACH)):
            asked = rollouts(processor.placeholder_id, images, each)
            apart = 0.0
            for at, sample in enumerate(await scored(engine, asked)):
                own = images[EACH * at :][:each]
                known, scores = expected(reference, processor, asked[at], own), sample.scores
                apart = max(apart, float(np.abs(scores.logprobs - known).max()))  # type: ignore[union-attr]
            found[name] = apart
    finally:
        await engine.shutdown()
    return found


def resident() -> float:
    """GiB of host memory of this process, which keeps images: the engine's own has them briefly."""
    return float(psutil.Process().memory_info().rss) / GIB


async def most(until: asyncio.Task[Any]) -> float:
    """Of ``resident`` until the task has ended, which is then awaited."""
    found = 0.0
    while not until.done():
        found = max(found, resident())
        await asyncio.wait([until], timeout=WATCH_S)
    await until
    return found


async def memory(model: Path, device: Device, count: int) -> Figures:
    """Of an engine as it is configured, which scores prompts without images first."""
    processor, images = ImageProcessor.load(str(model)), [noise(seed) for seed in range(count)]
    teacher, before = Teacher(model, device), used_gib()
    config, spec, machine = teacher.config, teacher.spec, Machine(device)
    engine = replica(spec, images, config.data.image_cache_mib << 20)
    try:
        await engine.ready()
        texts, asked = (rollouts(processor.placeholder_id, images, each) for each in (0, EACH))
        await scored(engine, texts)
        text = resident()
        top = await most(asyncio.create_task(scored(engine, asked)))
        gc.collect()
        kept, used = resident() - text, used_gib()
    finally:
        await engine.shutdown()
    cache = memory_of(config, teacher.name, machine).host["image cache"] / GIB
    flight = PIXEL_BYTES * SIDE**2 * count / GIB
    found = {
        "images": count,
        "kept_gib": kept,
        "cache_gib": cache,
        "kept_share": kept / cache,
        "most_gib": top - text,
        "most_share": (top - text) / (cache + flight),
    }
    if device == "cpu":
        return found
    total = smallest_gpu() or torch.cuda.get_device_properties(0).total_memory
    share = fitted(spec.kwargs, spec.beside, lambda: total)["gpu_memory_utilization"]
    planned = (share * total + sum(outside(config, teacher.name, machine).values())) / GIB
    taken = used[0] - before[0]
    return found | {"taken_gib": taken, "planned_gib": planned, "taken_share": taken / planned}


def main(report: Report) -> None:
    """See the module."""
    device: Device = "cuda" if report.device.type == "cuda" else "cpu"
    without_trainers_allocator(report.device)
    os.environ.update(engine_env(device, trusted=True))
    give_back_large_blocks()  # as a replica's process

    def of_tiny() -> Figures:
        return asyncio.run(agreement(gemma.saved(Path(folder) / "tiny", gemma.tokenizer()), device))

    def of_large() -> Figures:
        sizes, count = SIZES[device]
        model = gemma.saved(Path(folder) / "model", gemma.tokenizer(), *sizes, torch.bfloat16)
        return asyncio.run(memory(model, device, count))

    with tempfile.TemporaryDirectory() as folder:
        report.cell(of_tiny, what="agreement")
        report.cell(of_large, what="memory")
