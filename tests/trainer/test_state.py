"""The trainer's part of a checkpoint: bit for bit what it was, and nothing from another model."""

from __future__ import annotations

import asyncio
import json
import tempfile
import threading
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.numpy import save_file
from safetensors.torch import save_file as torch_save

from async_opd.core.batch import Batch
from async_opd.core.errors import CheckpointError
from async_opd.core.reports import Captured
from async_opd.core.row import Media
from async_opd.core.samples import Sample
from async_opd.core.scores import CandidateLogprobs, HiddenStates, SampledLogprobs, Scores, TopK
from async_opd.core.stages import SCORED, topics
from async_opd.queue.message_queue import MessageQueue
from tests.conftest import make_rollout, make_sample
from tests.trainer.models import bare_stage, samples_of
from tests.trainer.test_learner import learner
from tests.world.clock import settle
from trainer.batcher import Batcher
from trainer.learner import Learner
from trainer.saving.sample_file import (
    SCORED_FILE,
    decoded,
    encoded,
    read_samples,
    read_scored,
    write_samples,
    write_scored,
)
from trainer.saving.shards import Shards
from trainer.saving.state import stored_state
from trainer.stage import TrainerStage

KEYS = (3, 4, 5)


def batch(step: int) -> list[Sample]:
    return samples_of(4, 5, 6, first=10 * step)


def queue() -> MessageQueue:
    return MessageQueue(topics(["t"]), 64, 1 << 20, 60.0)


def stage(made: Any, messages: MessageQueue | None = None, batch_size: int = 1) -> TrainerStage:
    batcher = Batcher(messages or queue(), batch_size=batch_size)
    return bare_stage(made, batcher)


def weights(made: Any) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in made.model.state_dict().items()}


async def trained_stage(
    steps: int, messages: MessageQueue, own: Learner | None = None
) -> TrainerStage:
    made = stage(own or learner(schedule="cosine"), messages, batch_size=3)
    for step in range(steps):
        await messages.put(SCORED, Batch.pack(batch(step)))
        await made.step()
    return made


async def captured_by(one: TrainerStage) -> Captured | None:
    with suppress(CheckpointError):
        return await one.capture()
    return None


async def test_no_second_copy_is_made_while_one_that_was_given_up_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing ends the thread that writes: it holds its copy until the disk has it."""
    made = learner()
    begun, disk = threading.Event(), threading.Event()
    write = made.write

    def slow(folder: str) -> Any:
        begun.set()
        assert disk.wait(20)
        return write(folder)

    monkeypatch.setattr(made, "write", slow)
    one = stage(made)
    await one.capture()
    given_up = asyncio.create_task(one.checkpoint(str(tmp_path), frozenset()))
    await asyncio.to_thread(begun.wait, 20)
    given_up.cancel()
    with pytest.raises(CheckpointError, match="still being written"):
        await one.capture()
    disk.set()
    async with asyncio.timeout(20):
        while not (captured := await captured_by(one)):
            await settle()
    assert captured.nbytes > 0


async def test_a_stage_goes_on_bit_for_bit_after_a_restore(tmp_path: Path) -> None:
    messages = queue()
    first, second = learner(schedule="cosine"), learner(seed=5, schedule="cosine")
    one = await trained_stage(3, messages, first)
    captured = await one.capture()
    for step in KEYS:
        await messages.put(SCORED, Batch.pack(batch(step)))
        await one.step()
    await one.checkpoint(str(tmp_path), frozenset())
    later = queue()
    two = stage(second, later, batch_size=3)
    assert await two.restore(str(tmp_path)) == frozenset()
    for step in KEYS:
        await later.put(SCORED, Batch.pack(batch(step)))
        report = await two.step()
    own, other = weights(first), weights(second)
    assert [name for name in own if not torch.equal(own[name], other[name])] == []
    assert (captured.step, report.step) == (3, 6)


async def test_a_stage_takes_a_models_weights_as_those_after_a_step_with_no_moments(
    tmp_path: Path,
) -> None:
    first, second = learner(), learner(seed=5)
    sent = dict(first.named_weights())
    torch_save(
        {name: one.contiguous() for name, one in sent.items()}, tmp_path / "model.safetensors"
    )
    made = await trained_stage(1, queue(), second)
    await made.forget_moments()  # as those of a new one
    await made.adopt(str(tmp_path), step=6, version=3)
    found = dict(second.named_weights())
    assert [name for name in sent if not sent[name].equal(found[name])] == []
    captured = await made.capture()
    await made.checkpoint(str(tmp_path), frozenset())
    shards = Shards(tmp_path)
    assert (captured.step, shards.stamp.step, shards.stamp.version) == (6, 6, 3)
    assert not [name for name in shards.names if name.startswith("optimizer/")]


async def test_a_capture_has_the_report_of_the_last_step_also_before_it_is_answered(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    messages = queue()
    made = await trained_stage(2, messages)
    await messages.put(SCORED, Batch.pack(batch(2)))
    done, captured = Batcher.done, list[Captured]()

    async def captures_meanwhile(batcher: Batcher) -> None:
        captured.append(await made.capture())
        await done(batcher)

    monkeypatch.setattr(Batcher, "done", captures_meanwhile)
    report = await made.step()
    assert (captured[0].report, report.step) == (report, 3)


async def test_a_capture_of_a_restored_trainer_has_no_report(tmp_path: Path) -> None:
    messages = queue()
    made = await trained_stage(2, messages)
    await made.capture()
    await made.checkpoint(str(tmp_path), frozenset())
    await made.restore(str(tmp_path))
    assert (await made.capture()).report is None


async def test_scored_samples_are_kept_wherever_they_are(tmp_path: Path) -> None:
    messages = queue()
    made = stage(learner(), messages, batch_size=4)
    kept = [
        make_sample(f"{name}/0", version=version)
        for name, version in zip("abcd", (0, 0, 0, 1), strict=True)
    ]
    await messages.put(SCORED, Batch.pack(kept[:2]))
    step = asyncio.create_task(made.step())
    await asyncio.sleep(0.01)
    await messages.put(SCORED, Batch.pack(kept[2:3]))
    await made.capture()
    await made.checkpoint(str(tmp_path), frozenset(["a/0", "c/0", "d/0"]))
    step.cancel()
    batcher = Batcher(queue(), batch_size=1)
    assert await bare_stage(learner(), batcher).restore(str(tmp_path)) == {"a/0", "c/0"}
    assert [s.rollout.uid for s in await batcher.copy_held()] == ["a/0", "c/0"]


async def test_a_sample_with_tokens_of_later_weights_is_left_out(tmp_path: Path) -> None:
    messages = queue()
    made = stage(learner(), messages)
    await messages.put(SCORED, Batch.pack([make_sample("a/0", version=1), make_sample("b/0")]))
    await made.capture()
    await made.checkpoint(str(tmp_path), frozenset(["a/0", "b/0"]))
    assert [s.rollout.uid for s in read_scored(tmp_path)] == ["b/0"]


def test_prompts_keep_their_images_and_those_of_files_without_the_key_have_none() -> None:
    image, rollout = Media("a1" * 32, 70, 8, 4), make_rollout("p/1", version=3)
    rollout = replace(rollout, prompt=replace(rollout.prompt, media=(image,)), media=(image,))
    arrays, entries = encoded([Sample(rollout, next(iter(scores())))])
    (read,) = decoded(entries, arrays)
    assert (read.rollout.prompt.media, read.rollout.media) == ((image,), (image,))
    plain = json.loads(entries)
    del plain[0]["prompt"]["media"]
    (read,) = decoded(json.dumps(plain), arrays)
    assert read.rollout.prompt.media == ()


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    folder = tmp_path_factory.mktemp("checkpoint")
    write_scored(folder, [Sample(make_rollout("p/1", version=3), kind) for kind in scores()])
    return (folder / SCORED_FILE).read_bytes()


@given(data=st.data())
def test_any_file_is_read_or_a_checkpoint_error(file: bytes, data: st.DataObject) -> None:
    content = bytearray(file)
    for at in data.draw(st.lists(st.integers(0, len(content) - 1), max_size=3)):
        content[at] = data.draw(st.integers(0, 255))
    for old, new in data.draw(st.lists(st.sampled_from(LIES), max_size=2)):
        content = content.replace(old, new)  # of the same length: the header stays one
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / SCORED_FILE).write_bytes(bytes(content))
        with suppress(CheckpointError):
            read_scored(Path(folder))


LIES = [
    (b"continuation", b"continuatiom"),
    (b"student", b"teacher"),
    (b"[3, 7, ", b"[3, 9, "),
    (b"[3, 7, ", b"[2, 7, "),
    (b"TopK", b"Topk"),
    (b"spans", b"spams"),
    (b"bfloat16", b"bfloat61"),
    (b'\\"stop\\"', b"[      ]"),
    (b"step", b"stop"),
    (b"I32", b"F32"),
    (b"[[3, 0, 4]]", b"[[3, 1, 4]]"),
    (b"[[3, 0, 4]]", b"          3"),
]


def scores() -> list[Scores]:
    ids, logprobs = np.arange(8, dtype=np.int32).reshape(4, 2), np.ones((4, 2), np.float32)
    own = np.full(4, -2.0, np.float32)
    states = np.arange(12, dtype=np.uint16).reshape(4, 3)
    return [
        SampledLogprobs(own),
        TopK(ids, logprobs, own),
        TopK(ids, logprobs, own, own),
        CandidateLogprobs(ids, logprobs, own, own),
        HiddenStates(states, "bfloat16"),
        HiddenStates(states.astype(np.float16), "float16"),
    ]


@pytest.mark.parametrize("kind", scores(), ids=lambda kind: type(kind).__name__)
def test_samples_come_out_of_a_file_as_they_went_in(kind: Scores, tmp_path: Path) -> None:
    samples = [Sample(make_rollout("p/1", version=3), kind), make_sample("q/0", tokens=0)]
    write_samples(tmp_path / "scored.safetensors", samples)
    found = read_samples(tmp_path / "scored.safetensors")
    assert repr(found) == repr(samples)
    for one, two in zip(samples, found, strict=True):
        for name, array in vars(one.scores).items():
            if isinstance(array, np.ndarray):
                other = getattr(two.scores, name)
                assert (array.dtype, array.shape) == (other.dtype, other.shape)
                assert np.array_equal(array, other)


def test_samples_of_a_version_that_knew_no_rest_are_read(tmp_path: Path) -> None:
    ids, own = np.arange(8, dtype=np.int32).reshape(4, 2), np.full(4, -2.0, np.float32)
    scores = TopK(ids, ids.astype(np.float32), own, own)
    write_samples(tmp_path / "new", [Sample(make_rollout("p/1"), scores)])
    with safe_open(tmp_path / "new", "np") as file:
        arrays = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        metadata = file.metadata()
    del arrays["0/scores/rest_logprobs"]
    save_file(arrays, tmp_path / "old", metadata=metadata)
    (sample,) = read_samples(tmp_path / "old")
    assert isinstance(sample.scores, TopK)
    assert sample.scores.rest_logprobs is None


@pytest.mark.parametrize(
    ("frozen", "names"),
    [
        (False, ["weight", "bias", "running_mean", "running_var", "num_batches_tracked"]),
        (True, ["bias"]),
    ],
)
def test_a_checkpoint_has_all_of_a_model_or_the_trained_part(
    frozen: bool, names: list[str]
) -> None:
    """Buffers too: the frozen rest, with its buffers, comes from the student's own files."""
    model = torch.nn.BatchNorm1d(2)
    model.weight.requires_grad_(not frozen)
    assert [name for name, _ in stored_state(model)] == names
