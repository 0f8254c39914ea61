"""Builders shared by the tests."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import settings

from async_opd.core.samples import Prompt, Rollout, Sample, SampledLogprobs, VersionSpan

settings.register_profile("busy machines", deadline=None)
settings.load_profile("busy machines")


def make_prompt(uid: str = "p", teacher: str = "t", tokens: int = 3) -> Prompt:
    """A prompt of ``tokens`` tokens."""
    return Prompt(uid, teacher, teacher, np.arange(tokens, dtype=np.int32))


def make_rollout(
    uid: str = "p/0", teacher: str = "t", tokens: int = 4, version: int = 0, prompt_tokens: int = 3
) -> Rollout:
    """A rollout of ``tokens`` response tokens, all of one version."""
    return Rollout.plain(
        uid=uid,
        prompt=make_prompt(uid.rpartition("/")[0], teacher, prompt_tokens),
        response_ids=np.arange(tokens, dtype=np.int32),
        rollout_logprobs=np.full(tokens, -1.0, dtype=np.float32),
        version_spans=(VersionSpan(version, 0, tokens),) if tokens else (),
        finish_reason="stop",
    )


def make_sample(uid: str = "p/0", tokens: int = 4, version: int = 0) -> Sample:
    """A scored rollout."""
    rollout = make_rollout(uid, tokens=tokens, version=version)
    return Sample(rollout, SampledLogprobs(np.full(tokens, -0.5, dtype=np.float32)))


@pytest.fixture
def quickstart() -> str:
    """The folder with the quickstart's models and data."""
    from pathlib import Path

    return str(Path(__file__).parent.parent / "examples" / "quickstart")
