"""``async_opd replay``: the same bits again, where they first differ, and why it is refused."""

from __future__ import annotations

import json
import random
import shutil
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from async_opd.core.samples import Sample
from async_opd.core.scores import TopK
from async_opd.files.kept_steps import KEPT, kept_name
from tests.tools.replay import kept
from tests.world.cli import Cli
from trainer.build import build_learner
from trainer.replay.kept_step import KeptStep, Record, read_kept, write_kept

STEPS = 24


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of 24 steps with checkpoints of steps 8 and 16."""
    folder = tmp_path_factory.mktemp("runs") / "run"
    config = kept.config_of(folder)
    names = config.teachers
    config = kept.config_of(folder, *(f"teachers.{name}.weight=auto" for name in names))
    kept.begin(config, folder)
    kept.train(config, build_learner(config, "cpu"), range(1, STEPS + 1))
    return folder


@pytest.fixture
def run_dir(trained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of it, which a test may change; replays run in this process."""
    kept.launched(monkeypatch)
    return Path(shutil.copytree(trained, tmp_path / "run"))


def replay(folder: Path, step: int, cli: Cli, code: int = 0) -> dict[str, Any]:
    """The JSON document of a replay."""
    found: dict[str, Any] = json.loads(
        cli("replay", folder, "--step", step, "--json", code=code).out
    )
    return found


def changed(folder: Path, step: int, change: Callable[[KeptStep], KeptStep]) -> None:
    """Writes a step's file again with a change, and the digest of the changed content."""
    path = folder / KEPT / kept_name(step, 0, 1)
    write_kept(path, change(read_kept(path)))


@pytest.mark.slow
def test_twenty_random_steps_are_equal(run_dir: Path, cli: Cli) -> None:
    for step in random.Random(17).sample(range(1, STEPS + 1), 20):
        found = replay(run_dir, step, cli)
        assert (found["equal"], found["difference"]) == (True, None)
        assert found["start"] == (step - 1) // 8 * 8
        assert found["computed"] == step - found["start"]


def test_a_changed_score_is_found_in_its_step_with_results_and_weights(
    run_dir: Path, cli: Cli
) -> None:
    def with_another_score(step: KeptStep) -> KeptStep:
        sample = next(one for one in step.samples if len(one.rollout.response_ids) > 2)
        assert isinstance(sample.scores, TopK)
        logprobs = sample.scores.logprobs.copy()
        logprobs[1, 0] -= 0.125
        other = Sample(sample.rollout, replace(sample.scores, logprobs=logprobs))
        return replace(step, samples=tuple(other if s is sample else s for s in step.samples))

    changed(run_dir, 11, with_another_score)
    found = replay(run_dir, 14, cli, code=1)
    assert (found["equal"], found["computed"]) == (False, 3)
    where = found["difference"]
    assert where["step"] == 11
    assert where["numbers"][0]["name"] == "loss/total"
    assert where["numbers"][1]["name"] == "train/grad_norm"
    assert 0 < where["numbers"][0]["difference"] < 0.1
    (weights,) = where["weights"]
    assert weights["first"] == "model.embed_tokens.weight"
    assert 0 < weights["count"] <= weights["total"]
    assert 0 < weights["largest"] < 0.01
    words = cli("replay", run_dir, "--step", 14, code=1).out
    assert "step 14 is not bit-equal" in words
    assert "the first difference is in step 11" in words
    replay(run_dir, 18, cli)  # after the next checkpoint: equal


def test_weights_that_differ_in_the_last_bit_are_named_though_all_results_are_equal(
    run_dir: Path, cli: Cli
) -> None:
    name = "model.layers.1.mlp.up_proj.weight"

    def with_other_weights(step: KeptStep) -> KeptStep:
        digests = step.record.digests
        last = "0" if digests[name][-1] != "0" else "1"
        other = digests | {name: digests[name][:-1] + last}
        entries = step.entries.copy()
        row = list(digests).index(name)
        entries[row, 3] = np.nextafter(entries[row, 3], np.float32(1))
        return replace(step, record=replace(step.record, digests=other), entries=entries)

    changed(run_dir, 9, with_other_weights)
    found = replay(run_dir, 9, cli, code=1)
    assert found["difference"]["numbers"] == []
    (weights,) = found["difference"]["weights"]
    assert (weights["count"], weights["first"]) == (1, name)
    assert 0 < weights["largest"] < 1e-7
    path = run_dir / KEPT / kept_name(20, 0, 1)
    content = bytearray(path.read_bytes())
    content[-3] ^= 1
    path.write_bytes(content)
    printed = cli("replay", run_dir, "--step", 22, code=1)
    assert "it was changed or cut off after it was written" in printed.err


def refused(folder: Path, step: int, cli: Cli) -> str:
    """The words with which a replay is refused."""
    return " ".join(cli("replay", folder, "--step", step, code=2).err.split())


@pytest.mark.parametrize(
    ("lost", "step", "words"),
    [
        (18, 18, "the batch of step 18 is not kept → one of 1 to 17, 19 to 24"),
        (18, 21, "from the checkpoint of step 16 on, batches of steps 18 are not kept"),
        (18, 25, "the batch of step 25 is not kept"),
        (1, 7, "no checkpoint before step 7 is left"),
    ],
)
def test_it_is_refused_without_a_batch_that_it_needs(
    lost: int, step: int, words: str, run_dir: Path, cli: Cli
) -> None:
    (run_dir / KEPT / kept_name(lost, 0, 1)).unlink()
    assert words in refused(run_dir, step, cli)


def with_platform(step: KeptStep, **other: str) -> KeptStep:
    """Another platform than the one on which the step was computed."""
    return replace(step, record=replace(step.record, platform=step.record.platform | other))


def test_it_is_refused_without_log_replay(tmp_path: Path, cli: Cli) -> None:
    config = kept.config_of(tmp_path, "log.replay=false")
    kept.begin(config, tmp_path)
    metrics = kept.train(config, build_learner(config, "cpu"), range(1, 2))
    assert not any(key.startswith("replay/") for key in metrics[0])
    assert not (tmp_path / KEPT).exists()
    assert "log.replay was off: no batches are kept" in refused(tmp_path, 3, cli)


def with_another_config(step: KeptStep) -> KeptStep:
    """Another setting of the trainer."""
    record: Record = step.record
    train = record.config["train"] | {"tokens_per_micro_batch": 77}
    return replace(step, record=replace(record, config=record.config | {"train": train}))


def with_another_result(step: KeptStep) -> KeptStep:
    """The name of one result is another one."""
    before = dict(step.record.result.quantities)
    before["loss/of_old"] = before.pop("loss/entropy")
    result = replace(step.record.result, quantities=before)
    return replace(step, record=replace(step.record, result=result))


def with_kernels(step: KeptStep, **kernels: str) -> KeptStep:
    """Other kernels, or none as an older version wrote it."""
    assert step.record.kernels == {"objective": "eager", "decoder layers": "eager"}
    return replace(step, record=replace(step.record, kernels=kernels))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (partial(with_platform, device="other"), "device of rank 0: the run had other, here is"),
        (with_another_config, "the run was resumed with other settings of train in between"),
    ],
)
def test_it_is_refused_where_it_cannot_be_bit_equal(
    change: Callable[[KeptStep], KeptStep], words: str, run_dir: Path, cli: Cli
) -> None:
    changed(run_dir, 9, change)
    assert words in refused(run_dir, 9 + (change is with_another_config), cli)


@pytest.mark.parametrize(
    ("change", "warnings"),
    [
        (partial(with_platform, torch="1.0"), ["torch of rank 0: the run had 1.0, here is "]),
        (with_another_result, ["only the run has 1 results", "only this version has 1 results"]),
        (
            partial(with_kernels, objective="compiled"),
            ["objective of rank 0: compiled in the run, eager now"],
        ),
        (with_kernels, []),
    ],
)
def test_another_version_is_a_warning(
    change: Callable[[KeptStep], KeptStep], warnings: list[str], run_dir: Path, cli: Cli
) -> None:
    changed(run_dir, 9, change)
    found = replay(run_dir, 9, cli)
    for warning, start in zip(found["warnings"], warnings, strict=True):
        assert warning.startswith(start)


SETTINGS = {
    "adapters": ["train.lora={rank: 4, alpha: 8}"],
    "rewards of groups": ["reward={grader: exact, weight: 1.0}", "rollout.n=2"],
    "masked tokens": ["async.on_stale=mask", "async.max_version_lag=0"],
    "estimator, in float32 with two threads": ["loss={kind: k3}", "train.threads=2"],
}


@pytest.mark.slow
@pytest.mark.parametrize("settings", SETTINGS.values(), ids=SETTINGS)
def test_steps_of_other_settings_are_bit_equal(
    settings: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cli: Cli
) -> None:
    kept.launched(monkeypatch)
    config = kept.config_of(tmp_path, *settings)
    kept.begin(config, tmp_path)
    kept.train(config, build_learner(config, "cpu"), range(1, 13))
    for step in (5, 12):
        assert replay(tmp_path, step, cli)["equal"]


def test_a_step_is_not_kept_through_a_link(run_dir: Path, tmp_path: Path) -> None:
    (tmp_path / "outside").write_text("mine")
    name = kept_name(STEPS, 0, 1)
    (run_dir / KEPT / f".{name}.partial").symlink_to(tmp_path / "outside")
    changed(run_dir, STEPS, lambda step: step)
    assert (tmp_path / "outside").read_text() == "mine"
