"""``async_opd replay``: the same bits again, where they first differ, and why it is refused."""

from __future__ import annotations

import json
import random
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from async_opd.cli import main
from async_opd.core.samples import Sample
from async_opd.core.scores import TopK
from async_opd.files.kept_steps import KEPT, kept_name
from tests.tools.replay import kept
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


def replay(
    folder: Path, step: int, capsys: pytest.CaptureFixture[str]
) -> tuple[int, dict[str, Any]]:
    """Exit code and JSON document."""
    code = main(["replay", str(folder), "--step", str(step), "--json"])
    return code, json.loads(capsys.readouterr().out or "{}")


def changed(folder: Path, step: int, change: Callable[[KeptStep], KeptStep]) -> None:
    """Writes a step's file again with a change, and the digest of the changed content."""
    path = folder / KEPT / kept_name(step, 0, 1)
    write_kept(path, change(read_kept(path)))


@pytest.mark.slow
def test_twenty_random_steps_are_bit_equal(
    run_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for step in random.Random(17).sample(range(1, STEPS + 1), 20):
        code, found = replay(run_dir, step, capsys)
        assert (code, found["equal"], found["difference"]) == (0, True, None)
        assert found["start"] == (step - 1) // 8 * 8
        assert found["computed"] == step - found["start"]


def test_a_changed_score_is_found_in_its_step_with_results_and_weights(
    run_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def with_another_score(step: KeptStep) -> KeptStep:
        sample = next(one for one in step.samples if len(one.rollout.response_ids) > 2)
        assert isinstance(sample.scores, TopK)
        logprobs = sample.scores.logprobs.copy()
        logprobs[1, 0] -= 0.125
        other = Sample(sample.rollout, replace(sample.scores, logprobs=logprobs))
        return replace(step, samples=tuple(other if s is sample else s for s in step.samples))

    changed(run_dir, 11, with_another_score)
    code, found = replay(run_dir, 14, capsys)
    assert (code, found["equal"], found["computed"]) == (1, False, 3)
    where = found["difference"]
    assert where["step"] == 11
    assert where["numbers"][0]["name"] == "loss/total"
    assert where["numbers"][1]["name"] == "train/grad_norm"
    assert 0 < where["numbers"][0]["difference"] < 0.1
    (weights,) = where["weights"]
    assert weights["first"] == "model.embed_tokens.weight"
    assert 0 < weights["count"] <= weights["total"]
    assert 0 < weights["largest"] < 0.01
    assert main(["replay", str(run_dir), "--step", "14"]) == 1
    words = capsys.readouterr().out
    assert "step 14 is not bit-equal" in words
    assert "the first difference is in step 11" in words
    assert replay(run_dir, 18, capsys)[0] == 0  # after the next checkpoint


def test_weights_that_differ_in_the_last_bit_are_named_though_all_results_are_equal(
    run_dir: Path, capsys: pytest.CaptureFixture[str]
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
    code, found = replay(run_dir, 9, capsys)
    assert (code, found["difference"]["numbers"]) == (1, [])
    (weights,) = found["difference"]["weights"]
    assert (weights["count"], weights["first"]) == (1, name)
    assert 0 < weights["largest"] < 1e-7


def test_a_file_that_was_damaged_is_no_batch(
    run_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = run_dir / KEPT / kept_name(10, 0, 1)
    content = bytearray(path.read_bytes())
    content[-3] ^= 1
    path.write_bytes(content)
    assert main(["replay", str(run_dir), "--step", "12"]) == 1
    assert "it was changed or cut off after it was written" in capsys.readouterr().err


def refused(folder: Path, step: int, capsys: pytest.CaptureFixture[str]) -> str:
    """The words with which a replay is refused."""
    assert main(["replay", str(folder), "--step", str(step)]) == 2
    return " ".join(capsys.readouterr().err.split())


def test_it_is_refused_without_the_batch_of_each_step_since_the_checkpoint(
    run_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (run_dir / KEPT / kept_name(18, 0, 1)).unlink()
    words = "the batch of step 18 is not kept → one of 1 to 17, 19 to 24"
    assert words in refused(run_dir, 18, capsys)
    assert "from the checkpoint of step 16 on, batches of steps 18 are not kept" in refused(
        run_dir, 21, capsys
    )
    assert "the batch of step 25 is not kept" in refused(run_dir, 25, capsys)


def test_it_is_refused_without_a_checkpoint_before_the_step(
    run_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (run_dir / KEPT / kept_name(1, 0, 1)).unlink()
    assert "no checkpoint before step 7 is left" in refused(run_dir, 7, capsys)


def test_it_is_refused_where_log_replay_was_off(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    kept.begin(kept.config_of(tmp_path, "log.replay=false"), tmp_path)
    assert "log.replay was off: no batches are kept" in refused(tmp_path, 3, capsys)


def with_platform(**other: str) -> Callable[[KeptStep], KeptStep]:
    """Changes what a step says of where it was computed."""

    def change(step: KeptStep) -> KeptStep:
        platform = step.record.platform | other
        return replace(step, record=replace(step.record, platform=platform))

    return change


def test_it_is_refused_on_another_device(run_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    changed(run_dir, 9, with_platform(device="one of another house"))
    words = refused(run_dir, 9, capsys)
    assert "device of rank 0: the run had one of another house, here is" in words


def test_another_version_of_a_library_is_a_warning(
    run_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    changed(run_dir, 9, with_platform(torch="1.0"))
    code, found = replay(run_dir, 9, capsys)
    assert code == 0
    (warning,) = found["warnings"]
    assert warning.startswith("torch of rank 0: the run had 1.0, here is ")


def test_it_is_refused_if_the_config_changed_since_the_checkpoint(
    run_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def with_another_config(step: KeptStep) -> KeptStep:
        record: Record = step.record
        train = record.config["train"] | {"tokens_per_micro_batch": 77}
        return replace(step, record=replace(record, config=record.config | {"train": train}))

    changed(run_dir, 9, with_another_config)
    words = refused(run_dir, 10, capsys)
    assert "the run was resumed with other settings of train in between" in words


def test_a_result_that_only_one_version_has_is_a_warning(
    run_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def with_another_result(step: KeptStep) -> KeptStep:
        before = dict(step.record.result.quantities)
        before["loss/of_old"] = before.pop("loss/entropy")
        result = replace(step.record.result, quantities=before)
        return replace(step, record=replace(step.record, result=result))

    changed(run_dir, 9, with_another_result)
    code, found = replay(run_dir, 9, capsys)
    assert code == 0
    assert found["warnings"] == [
        "only the run has 1 results, such as loss/of_old: they are not compared",
        "only this version has 1 results, such as loss/entropy: they are not compared",
    ]


def test_a_part_that_ran_compiled_in_the_run_and_eagerly_now_is_a_warning(
    run_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def compiled(step: KeptStep) -> KeptStep:
        assert step.record.kernels == {"objective": "eager", "decoder layers": "eager"}
        kernels = {"objective": "compiled", "decoder layers": "eager"}
        return replace(step, record=replace(step.record, kernels=kernels))

    changed(run_dir, 9, compiled)
    code, found = replay(run_dir, 9, capsys)
    assert code == 0
    (warning,) = found["warnings"]
    assert warning.startswith("objective of rank 0: compiled in the run, eager now")


def test_a_file_of_a_version_that_kept_no_choice_of_kernels_is_no_mismatch(
    run_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    changed(run_dir, 9, lambda step: replace(step, record=replace(step.record, kernels={})))
    assert replay(run_dir, 9, capsys)[1]["warnings"] == []


SETTINGS = {
    "adapters": ["train.lora={rank: 4, alpha: 8}"],
    "rewards of groups": ["reward={grader: exact, weight: 1.0}", "rollout.n=2"],
    "estimator, in float32 with two threads": ["loss={kind: k3}", "train.threads=2"],
}


@pytest.mark.slow
@pytest.mark.parametrize("settings", SETTINGS.values(), ids=SETTINGS)
def test_steps_of_other_settings_are_bit_equal(
    settings: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    kept.launched(monkeypatch)
    config = kept.config_of(tmp_path, *settings)
    kept.begin(config, tmp_path)
    kept.train(config, build_learner(config, "cpu"), range(1, 13))
    for step in (5, 12):
        code, found = replay(tmp_path, step, capsys)
        assert (code, found["equal"]) == (0, True), found


def test_a_step_is_not_kept_through_a_link(run_dir: Path, tmp_path: Path) -> None:
    (tmp_path / "outside").write_text("mine")
    name = kept_name(STEPS, 0, 1)
    (run_dir / KEPT / f".{name}.partial").symlink_to(tmp_path / "outside")
    changed(run_dir, STEPS, lambda step: step)
    assert (tmp_path / "outside").read_text() == "mine"
