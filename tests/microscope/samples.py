"""Records of samples, without a trainer."""

from __future__ import annotations

from typing import Any

import numpy as np

from async_opd.microscope import SampleRecord

TEXTS = {i: chr(ord("a") + i) for i in range(26)}


def record(uid: str = "p/0", tokens: int = 4, seed: int = 0, **fields: Any) -> SampleRecord:
    """A sample of teacher ``t`` with random columns, sampled by version 0 and trained by 1."""
    random = np.random.default_rng(seed)
    logprobs = {
        name: -random.random(tokens, dtype=np.float32)
        for name in ("rollout_logprob", "student_logprob", "teacher_logprob")
    }
    top = {
        f"{side}_{what}": -np.sort(random.random((tokens, 3), dtype=np.float32))
        for side, what in (
            ("student", "logprobs"),
            ("support", "teacher_logprobs"),
            ("support", "student_logprobs"),
        )
    }
    ids = {
        f"{side}_ids": random.integers(0, 26, (tokens, 3), np.int32)
        for side in ("student", "support")
    }
    columns = {
        "position": np.arange(tokens, dtype=np.int32),
        "token": random.integers(0, 26, tokens, np.int32),
        "version": np.zeros(tokens, np.int32),
        **logprobs,
        "distillation": random.random(tokens, dtype=np.float32),
        "total": random.random(tokens, dtype=np.float32) / 100,
        "importance": np.ones(tokens, np.float32),
        "entropy": np.ones(tokens, np.float32),
        **top,
        **ids,
        "clamps": np.zeros(tokens, np.uint8),
    }
    columns |= fields.pop("columns", {})
    settings: dict[str, Any] = {
        "step": 1,
        "version": 1,
        "teacher": "t",
        "data_source": "s",
        "prompt": "2 + 2 =",
        "response_tokens": tokens,
        "finish_reason": "stop",
        "weight": 0.25,
        **fields,
    }
    return SampleRecord(uid, columns=columns, texts=TEXTS, **settings)
