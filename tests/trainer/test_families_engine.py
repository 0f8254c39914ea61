"""For unusual families the trainer computes the distribution of a real engine."""

from __future__ import annotations

import asyncio
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.engines import QUICKSTART, kwargs
from tests.trainer import families
from tests.world.config import run_config

pytestmark = [pytest.mark.engine, pytest.mark.usefixtures("engines_fork")]

ROPE = {
    **families.LONGROPE,
    "short_factor": [1.0] * 16,
    "long_factor": [4.0 + i for i in range(16)],
}


def sized(name: str, **settings: Any) -> Any:
    """With heads of a size that vLLM has a kernel for on a CPU."""
    return families.made(name, hidden_size=64, num_key_value_heads=2, **settings)


def phi3() -> Any:
    return sized(
        "Phi3",
        max_position_embeddings=128,
        original_max_position_embeddings=32,
        rope_parameters=dict(ROPE),
    )


def gemma2() -> Any:
    return sized(
        "Gemma2",
        head_dim=32,
        query_pre_attn_scalar=1,
        final_logit_softcapping=2.0,
        attn_logit_softcapping=None,  # with 1.0, vLLM 0.32 gave NaN on a CPU
    )


CASES = {
    "LongRoPE by default": (phi3, None, (31,)),
    "LongRoPE, a short and a long sequence of a long engine": (phi3, 128, (20, 60)),
    "a soft cap": (gemma2, 128, (20,)),
    "divided logits": (lambda: sized("Granite", logits_scaling=4.0), 128, (20,)),
}


def saved(model: Any, path: Path) -> Path:
    model.save_pretrained(path)
    shutil.copy(QUICKSTART / "models" / "student" / "tokenizer.json", path)
    return path


def engines(path: Path, length: int | None, sequences: list[list[int]]) -> list[np.ndarray]:
    """For each sequence, log q of each token but the first, of a real engine."""
    from vllm import AsyncEngineArgs, SamplingParams, TokensPrompt
    from vllm.v1.engine.async_llm import AsyncLLM

    async def scored() -> list[np.ndarray]:
        arguments = kwargs(path) | ({} if length is None else {"max_model_len": length})
        engine = AsyncLLM.from_engine_args(AsyncEngineArgs(**arguments))
        try:
            return [await of(engine, ids) for ids in sequences]
        finally:
            engine.shutdown()

    async def of(engine: Any, ids: list[int]) -> np.ndarray:
        wanted = SamplingParams(max_tokens=1, prompt_logprobs=0, detokenize=False)
        prompt = TokensPrompt(prompt_token_ids=ids)
        async for out in engine.generate(prompt, wanted, f"{len(ids)} tokens"):
            found = out.prompt_logprobs
        rows = zip(found[1:], ids[1:], strict=True)
        return np.array([row[token].logprob for row, token in rows])

    return asyncio.run(asyncio.wait_for(scored(), 300))


def trainers(path: Path, length: int | None, sequences: list[list[int]]) -> list[np.ndarray]:
    """The same of the student as the trainer loads it."""
    import torch

    from tests.trainer.models import load_student
    from trainer.batches.packing import Row
    from trainer.losses.chunked import shape_logits
    from trainer.student.attention import row_lengths
    from trainer.student.loss_module import DecoderAndHead

    config = run_config(student={"model": str(path)}, rollout={"engine": {"max_model_len": length}})
    modules = DecoderAndHead.of(load_student(config, torch.device("cpu")))

    def of(ids: list[int]) -> np.ndarray:
        row = Row.of([np.array(ids)], [np.arange(len(ids))])
        lengths = row_lengths(modules.decoder.config._attn_implementation, row)
        with torch.no_grad():
            decoded = modules.decoder(input_ids=row.input_ids, use_cache=False, **lengths)
            states = decoded.last_hidden_state[0]
            logits = shape_logits(modules.linear(states), modules.shape).log_softmax(-1)
        return logits[:-1].gather(-1, row.input_ids[0, 1:, None])[:, 0].numpy()

    return [of(ids) for ids in sequences]


@pytest.mark.parametrize("case", CASES)
def test_the_trainer_has_the_engines_logits(case: str, tmp_path: Path) -> None:
    made, length, counts = CASES[case]
    path = saved(made(), tmp_path / "model")
    sequences = [[(7 * index) % 29 + 3 for index in range(count)] for count in counts]
    found, own = (logprobs(path, length, sequences) for logprobs in (engines, trainers))
    assert [len(one) for one in own] == [count - 1 for count in counts]
    assert max(np.abs(a - b).max() for a, b in zip(found, own, strict=True)) < 1e-3
