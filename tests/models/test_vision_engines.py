"""vLLM and transformers compute the same of prompts with images, in every family that is taken."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import pytest_asyncio
import torch

from async_opd.config.sections.engine import EngineConfig
from async_opd.media.decode import decode
from async_opd.models.engine_args import engine_kwargs
from async_opd.models.processor import ImageProcessor
from async_opd.waiting.deadline import gather_or_cancel
from tests.vision_models import FAMILIES, TOKENS, gemma3

pytestmark = [
    pytest.mark.engine,
    pytest.mark.usefixtures("engines_fork"),
    pytest.mark.asyncio(loop_scope="module"),
]

BOUND = 1e-3
"""Nats between a log-probability of vLLM and one of transformers."""
SETTINGS = {"size": {"shortest_edge": 28 * 28, "longest_edge": 32 * 32 * 4}}
"""Of Qwen's processors: smaller images than the models' own files make of the same."""


def noise(width: int, height: int, seed: int) -> bytes:
    """An image of random pixels, encoded."""
    from io import BytesIO

    from PIL import Image

    pixels = np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)
    file = BytesIO()
    Image.fromarray(pixels).save(file, "PNG")
    return file.getvalue()


WIDE, TALL = noise(100, 60, 0), noise(30, 200, 1)
KINDS = {
    "qwen2_5_vl": "mm_token_type_ids",
    "qwen3_vl": "mm_token_type_ids",
    "gemma3": "token_type_ids",
}
"""The argument that says which tokens are an image's, by family."""
PROMPTS = {
    "text": ("sort 493021", []),
    "one image": ("|what?", [WIDE]),
    "an image after text": ("how many dots?|", [TALL]),
    "two images": ("left|right|which?", [WIDE, TALL]),
    "the same image twice": ("|and|", [TALL, TALL]),
}
"""Texts with a bar for each image."""


@dataclass
class Family:
    """A tiny model in both libraries."""

    engine: Any
    reference: Any
    processor: ImageProcessor

    def prompt(self, name: str) -> tuple[Any, list[bytes]]:
        """The short ids int32 of a prompt, and its images."""
        text, images = PROMPTS[name]
        placeholder = self.processor.placeholder_id
        ids = [placeholder if one == "|" else TOKENS.index(one) for one in text]
        return np.array(ids, np.int32), images

    async def answer(self, name: str, images: list[bytes] | None = None) -> Any:
        """The engine's result for a prompt: its answer and the log-probabilities of all tokens."""
        from vllm import SamplingParams
        from vllm.inputs import TokensPrompt

        ids, own = self.prompt(name)
        given = TokensPrompt(prompt_token_ids=ids.tolist())
        if own:
            shown = [decode(one) for one in (images or own)]
            given["multi_modal_data"] = {"image": shown}
        params = SamplingParams(
            max_tokens=6,
            seed=3,
            logprobs=0,
            prompt_logprobs=0,
            ignore_eos=True,
            detokenize=False,
            logit_bias=dict.fromkeys(self.processor.unsampled_ids, -100.0),
        )
        self.requests = getattr(self, "requests", 0) + 1
        async for output in self.engine.generate(given, params, f"{name}/{self.requests}"):
            last = output
        return last

    def expected(self, ids: list[int], images: list[bytes]) -> Any:
        """Log-probabilities [T - 1] of the tokens after the first, by transformers."""
        tokens = torch.tensor([ids])
        inputs = self.processor.inputs(images)
        shown = (tokens == self.reference.config.image_token_id).int()
        kind = KINDS.get(self.reference.config.model_type) if images else None
        with torch.no_grad():
            given = {kind: shown} if kind else {}
            logits = self.reference(input_ids=tokens, **inputs, **given).logits
        found = logits[0, :-1].double().log_softmax(-1)
        return found.gather(1, tokens[0, 1:, None])[:, 0].numpy()


@pytest_asyncio.fixture(scope="module", loop_scope="module", params=FAMILIES)
async def family(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[Family]:
    """One family's model."""
    folder: Path = FAMILIES[request.param](tmp_path_factory.mktemp(request.param))
    async with started(folder, {} if request.param == "llava" else SETTINGS) as found:
        yield found


@asynccontextmanager
async def started(folder: Path, settings: dict[str, Any]) -> AsyncIterator[Family]:
    """A model, its engine with the arguments of a replica, and its processor."""
    from transformers import AutoModelForImageTextToText
    from vllm import AsyncEngineArgs
    from vllm.v1.engine.async_llm import AsyncLLM

    kwargs = engine_kwargs(
        EngineConfig(max_model_len=256),
        model=str(folder),
        device="cpu",
        tensor_parallel=1,
        seed=0,
        trust_remote_code=False,
        images=2,
        processor_kwargs=settings,
    )
    engine = AsyncLLM.from_engine_args(AsyncEngineArgs(**kwargs))
    reference = AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32).eval()
    processor = ImageProcessor.load(str(folder), processor_kwargs=settings)
    try:
        yield Family(engine, reference, processor)
    finally:
        engine.shutdown()


def logprobs(output: Any) -> Any:
    """The engine's log-probabilities of all tokens of prompt and answer but the first."""
    answer = output.outputs[0]
    shown = [*output.prompt_logprobs[1:], *answer.logprobs]
    tokens = [*output.prompt_token_ids[1:], *answer.token_ids]
    return np.array([one[token].logprob for one, token in zip(shown, tokens, strict=True)])


@pytest.mark.parametrize("name", PROMPTS)
async def test_engine_and_processor_expand_a_prompt_alike(family: Family, name: str) -> None:
    ids, images = family.prompt(name)
    output = await family.answer(name)
    assert output.prompt_token_ids == family.processor.expand(ids, images).tolist()


async def test_log_probabilities_of_prompts_and_answers_agree(family: Family) -> None:
    outputs = await gather_or_cancel(*(family.answer(name) for name in PROMPTS))
    for name, output in zip(PROMPTS, outputs, strict=True):
        ids = [*output.prompt_token_ids, *output.outputs[0].token_ids]
        found, expected = logprobs(output), family.expected(ids, PROMPTS[name][1])
        assert np.abs(found - expected).max() <= BOUND, name


async def test_what_an_image_shows_matters(family: Family) -> None:
    one, other = [
        await family.answer("an image after text", [image]) for image in (TALL, noise(30, 200, 2))
    ]
    assert one.prompt_token_ids == other.prompt_token_ids
    assert np.abs(logprobs(one)[-6:] - logprobs(other)[-6:]).max() > 10 * BOUND


@pytest.mark.long
async def test_gemma_3_on_a_cpu_is_another_model_to_vllm(tmp_path: Path) -> None:
    async with started(gemma3(tmp_path), {}) as gemma:
        apart = {}
        for name in ("text", "one image"):
            output = await gemma.answer(name)
            ids = [*output.prompt_token_ids, *output.outputs[0].token_ids]
            expected = gemma.expected(ids, PROMPTS[name][1])
            apart[name] = np.abs(logprobs(output) - expected).max()
    assert apart["text"] <= BOUND
    assert apart["one image"] > BOUND  # else take it out of models/families.py: NOT_ON_CPU
