"""Real vLLM engines for tests: the environment they need, and how to start one on the quickstart.

Import this before vllm.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np

from async_opd.config.sections.engine import EngineConfig
from async_opd.core.samples import Prompt
from async_opd.models.engine_args import engine_env, engine_kwargs
from async_opd.models.tokenizer import Text

os.environ.update(engine_env("cpu", trusted=True))

QUICKSTART = Path(__file__).parent.parent / "examples" / "quickstart"
EOS = (2,)


def kwargs(model: str | Path, workers: int = 1, **settings: Any) -> dict[str, Any]:
    """Arguments of a small CPU engine of so many workers, with settings of its config section."""
    return engine_kwargs(
        EngineConfig(**settings),
        model=str(model),
        device="cpu",
        tensor_parallel=workers,
        seed=0,
        trust_remote_code=False,
    )


def prompts(count: int, task: str = "sort") -> list[Prompt]:
    """Prompts of one of the quickstart's tasks."""
    text = Text(QUICKSTART / "models" / "student")
    encoded = [text.encode(f"{task} {493021 + 7 * index}=") for index in range(count)]
    return [
        Prompt(f"{task}{index}", task, task, np.array(ids, np.int32))
        for index, ids in enumerate(encoded)
    ]


def reference_logprobs(
    model: Any, prompt_ids: Any, response_ids: Any, temperature: float = 1.0
) -> Any:
    """Log-probabilities [R, V] of a transformers model at the response positions, float64."""
    import torch

    ids = torch.tensor([[*prompt_ids.tolist(), *response_ids.tolist()]])
    with torch.no_grad():
        logits = model(ids).logits[0, len(prompt_ids) - 1 : -1].double()
    return (logits / temperature).log_softmax(-1).numpy()
