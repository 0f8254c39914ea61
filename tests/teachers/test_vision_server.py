"""A real vLLM server of a VLM teacher, with --enable-scale-out."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import pytest_asyncio

from async_opd.core.batch import Batch, unpack
from async_opd.core.errors import StageError
from async_opd.core.samples import Sample
from async_opd.core.stages import SamplingSpec
from async_opd.media.cache import MediaCache
from teachers.endpoint.replica import EndpointReplica, EndpointSpec
from tests.servers import VllmServer
from tests.teachers.test_vision_engine import rollouts
from tests.vision_models import EOS, SIZE, TOKENS, qwen3_vl
from tests.vision_prompts import PROMPTS, Fetches, Transformers, prompt_of

pytest.importorskip("torchvision")
pytestmark = [pytest.mark.engine, pytest.mark.long, pytest.mark.asyncio(loop_scope="module")]

K = 5
BOUND = 1e-3
NEVER = tuple(TOKENS.index(f"<|{kind}_pad|>") for kind in ("image", "video"))
KEY = "KEY_OF_THE_VISION_SERVER"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return qwen3_vl(tmp_path_factory.mktemp("teacher"))


@pytest.fixture(scope="module")
def server(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[VllmServer]:
    log = tmp_path_factory.mktemp("server") / "log.txt"
    limits = '{"image": 2, "video": 0}'
    options = ("--enable-scale-out", "--limit-mm-per-prompt", limits, "--max-model-len", "256")
    made = VllmServer(folder, "see", "secret", log, *options, "--skip-mm-profiling")
    made.start()
    try:
        made.wait()
        yield made
    finally:
        made.kill()


@pytest_asyncio.fixture(loop_scope="module")
async def replica(
    server: VllmServer, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[EndpointReplica]:
    monkeypatch.setenv(KEY, "secret")
    spec = EndpointSpec("teacher see/0", server.url, "vllm", "see", K, (EOS,), 4, SIZE, KEY, NEVER)
    made = EndpointReplica(spec, MediaCache(Fetches(), 1 << 20))
    try:
        yield made
    finally:
        await made.close()


async def test_scores_behind_images_are_transformers(
    replica: EndpointReplica, folder: Path
) -> None:
    reference = Transformers(folder)
    asked = rollouts(reference.processor.placeholder_id)
    samples = unpack(Sample, [await replica.score(Batch.pack(asked))])
    for rollout, sample in zip(asked, samples, strict=True):
        seen = rollout.for_teacher
        prompt = replace(seen.prompt, token_ids=reference.expanded(seen.prompt))
        table = reference.logprobs(seen.after(prompt))
        scores: Any = sample.scores
        sampled = table[np.arange(len(table)), rollout.response_ids]
        assert np.abs(scores.sampled_logprobs - sampled).max() < BOUND
        named = np.take_along_axis(table, scores.ids, axis=1)
        assert np.abs(scores.logprobs - named).max() < BOUND


async def test_a_server_answers_prompts_with_images(replica: EndpointReplica, folder: Path) -> None:
    reference = Transformers(folder)
    placeholder = reference.processor.placeholder_id
    prompts = [prompt_of(name, placeholder) for name in PROMPTS]
    for one in await replica.generate(prompts, SamplingSpec(4, 0.0, 1.0, 1)):
        prompt = replace(one.prompt, token_ids=reference.expanded(one.prompt))
        table = reference.logprobs(one.after(prompt), NEVER if one.prompt.media else ())
        assert table.argmax(axis=1).tolist() == one.response_ids.tolist()


async def test_a_server_refuses_more_images(replica: EndpointReplica, folder: Path) -> None:
    placeholder = Transformers(folder).processor.placeholder_id
    two = prompt_of("two", placeholder)
    three = replace(
        two, token_ids=np.append(two.token_ids, placeholder).astype(np.int32), media=two.media * 2
    )
    with pytest.raises(StageError, match=r"At most 2 image\(s\)"):
        await replica.generate([three], SamplingSpec(4, 0.0, 1.0, 1))
