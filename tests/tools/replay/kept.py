"""A run's trainer without its engines: real learner, kept steps and checkpoints, random samples."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from async_opd.accounting.journal import LEDGER
from async_opd.checkpoint.store import Checkpoints
from async_opd.config.load import dump_config, load_config
from async_opd.config.run_config import RunConfig
from async_opd.config.sections.loss import score_kind
from async_opd.core.samples import EpisodeFacts, Sample, VersionSpan
from async_opd.core.sequence import PROMPT, STUDENT, spans_of
from async_opd.files.run_format import write_run_format
from tests.checkpoint.test_store import cut
from tests.trainer.models import random_sample
from trainer.build import build_learner
from trainer.learner import Learner
from trainer.replay.replayer import Replayer

QUICKSTART = Path(__file__).parents[3] / "examples" / "quickstart.yaml"
BATCH = 6


def config_of(folder: Path, *overrides: str) -> RunConfig:
    """The quickstart's, with a small batch, which keeps its steps."""
    return load_config(
        QUICKSTART,
        [
            f"run_dir={folder}",
            f"train.batch_size={BATCH}",
            "train.steps=24",
            "async.sync_steps=2",
            "checkpoint.every=4",
            "log.replay=true",
            *overrides,
        ],
    )


def batch(config: RunConfig, step: int) -> list[Sample]:
    """Random samples of the teachers of a config, with the scores of its loss.

    With rewards two samples each are a group. The last one is an episode of two segments.
    """
    k = 0 if score_kind(config.loss) == "sampled" else 16
    made = [random_sample(100 * step + i, 1 + (step + 3 * i) % 8, k=k) for i in range(BATCH)]
    made[-1] = in_segments(made[-1])
    return [_placed(config, step, i, one) for i, one in enumerate(made)]


def in_segments(sample: Sample) -> Sample:
    """An episode with the same response, whose last token was sampled in a second segment."""
    one, context = sample.rollout, np.arange(3, dtype=np.int32)
    ids = np.concatenate([one.response_ids[:-1], context, one.response_ids[-1:]])
    first = len(one.response_ids) - 1
    spans = spans_of([(PROMPT, 3), (STUDENT, first), (PROMPT, 3), (STUDENT, 1)])
    episode = EpisodeFacts(2 if first else 1, calls=1, tool_s=0.25)
    return Sample(replace(one, continuation=ids, spans=spans, episode=episode), sample.scores)


def _placed(config: RunConfig, step: int, index: int, sample: Sample) -> Sample:
    teacher = list(config.teachers)[index % 2]
    rollout = sample.rollout
    more: dict[str, Any] = {}
    prompt = replace(rollout.prompt, teacher=teacher)
    if config.async_.on_stale == "mask":
        version, half = config.version_after(step - 1), len(rollout.response_ids) // 2
        spans = VersionSpan(max(version - 1, 0), 0, half), VersionSpan(version, half, 2 * half)
        more["version_spans"] = (*spans, VersionSpan(0, 2 * half, len(rollout.response_ids)))
    if config.reward is not None:
        prompt = replace(prompt, uid=f"p{step}g{index // 2}")
        more |= {"uid": f"{prompt.uid}/{index % 2}", "reward": float((index + step) % 3 == 0)}
    return Sample(replace(rollout, prompt=prompt, **more), sample.scores)


def begin(config: RunConfig, folder: Path) -> None:
    """Writes the files that a run has first."""
    folder.mkdir(parents=True, exist_ok=True)
    write_run_format(folder)
    (folder / "config.yaml").write_text(dump_config(config))


def train(
    config: RunConfig, learner: Learner, steps: range, keep: int = 9, factor: float = 1.0
) -> list[dict[str, float]]:
    """Trains steps, with the checkpoints of the config; their metrics."""
    folder, every = Path(str(config.run_dir)), config.steps_between(config.checkpoint)
    store = Checkpoints(folder / "checkpoints", keep)
    metrics = []
    learner.lr_factor = factor
    for step in steps:
        learner.version = config.version_after(step - 1)
        metrics.append(learner.train_batch(batch(config, step)).metrics)
        learner.compared("flush_records")  # a busy disk would lose steps
        if step % every == 0 and step < config.train.steps:
            take(store, learner, step)
    return metrics


def take(store: Checkpoints, learner: Learner, step: int) -> None:
    """A checkpoint of the learner's state."""
    learner.capture(step)
    part = store.begin(step)
    store.commit(part, replace(cut(step), files={LEDGER: 0}), "{}", learner.write(str(part)))


def launched(monkeypatch: Any, build: Callable[[RunConfig], Learner] | None = None) -> None:
    """Replays run in this process, on a learner that is built as that of a run."""
    from async_opd.cluster import launch_parts

    @asynccontextmanager
    async def replayer(config: RunConfig, **_: Any) -> AsyncIterator[Replayer]:
        made = build_learner(config, "cpu") if build is None else build(config)
        yield Replayer(made)

    monkeypatch.setattr(launch_parts, "launch_replayer", replayer)


def names(folder: Path) -> Sequence[str]:
    """The names of the files in a folder."""
    return sorted(path.name for path in folder.iterdir()) if folder.exists() else []
