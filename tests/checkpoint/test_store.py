"""Checkpoints on disk: whole or not loaded, the newest few kept; what --resume accepts."""

from __future__ import annotations

import itertools
import json
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from async_opd.accounting.ledger import LedgerState
from async_opd.accounting.run_state import Cut
from async_opd.checkpoint.resume import cut_files, evaluated_steps, identity, refuse_changes
from async_opd.checkpoint.store import CUT, MANIFEST, Checkpoints, load, superseded
from async_opd.core.errors import CheckpointError, ConfigError
from async_opd.core.reports import WrittenFile
from async_opd.core.row import Row
from async_opd.files.durable import written_file
from async_opd.grading.evaluation_files import EVALS
from tests.world.config import run_config as config


def cut(step: int) -> Cut:
    ledger = LedgerState(("p/0", "p/1"), 7, 1, ("q/0",))
    return Cut(step, step // 4, 10, 10, ledger, files={"dead_letters.jsonl": 5})


def written(folder: Path, *steps: int, keep: int = 2, window: int = 0) -> Checkpoints:
    return commit(Checkpoints(folder, keep, window), *steps)


def commit(store: Checkpoints, *steps: int) -> Checkpoints:
    for step in steps:
        part = store.begin(step)
        (part / "trainer.safetensors").write_bytes(bytes(range(100)))
        files = {"trainer.safetensors": written_file(part / "trainer.safetensors")}
        store.commit(part, cut(step), "{}", files)
    return store


def refused(message: str) -> Any:
    pytest.fail(f"unexpected: {message}")


def test_the_newest_few_and_the_one_with_the_best_evaluation_are_kept(tmp_path: Path) -> None:
    assert written(tmp_path / "few", 2, 4, 10, keep=2).steps() == [4, 10]
    best = tmp_path / "best"
    store = written(best, 2, 4, keep=1)
    store.evaluated.add(4, 0.9)
    written(best, 6, 8, keep=1)
    store.evaluated.add(8, 0.8)
    assert (written(best, 10, keep=1).steps(), store.best()) == ([4, 10], 4)


@pytest.mark.parametrize(
    ("steps", "values", "best"), [((2, 4, 6), {2: 0.9, 4: 0.9}, 4), ((2,), {2: 0.1, 4: 0.9}, 2)]
)
def test_the_best_is_the_newest_of_equal_ones_that_have_a_checkpoint(
    tmp_path: Path, steps: tuple[int, ...], values: dict[int, float], best: int
) -> None:
    store = written(tmp_path, *steps, keep=3)
    for step, value in values.items():
        store.evaluated.add(step, value)
    assert store.best() == best


def test_values_that_cannot_be_read_are_reported_and_no_checkpoint_is_lost(tmp_path: Path) -> None:
    store = written(tmp_path, 2, keep=1)
    (tmp_path / "evaluated.json").write_text("damaged")
    said: list[str] = []
    written(tmp_path, 4, keep=1)
    store.forget_evaluations((), said.append)
    assert (store.steps(), store.best()) == ([4], None)
    assert "evaluated.json cannot be read" in said[0]
    (tmp_path / "evaluated.json").unlink()
    store.evaluated.add(4, 0.9)
    other = replace(store, measure="another")
    other.forget_evaluations({4}, said.append)
    assert said[1:] == [
        "the values of 1 evaluated steps are not compared: checkpoint.keep_best, data.eval or "
        "settings of eval were others"
    ]
    assert other.best() is None


@pytest.mark.parametrize(("back", "left"), [(4, [2, 4]), (1, [2])])
def test_a_rollback_removes_the_checkpoints_after_its_step_but_not_the_oldest(
    tmp_path: Path, back: int, left: list[int]
) -> None:
    store = written(tmp_path, 2, 4, 6, keep=3)
    store.roll_back(back)
    assert store.steps() == left


def test_a_run_that_may_roll_back_keeps_a_checkpoint_from_before_the_window(tmp_path: Path) -> None:
    store = written(tmp_path, *range(1, 12), keep=2, window=10)
    assert store.steps() == [1, 9, 10, 11]


@pytest.mark.parametrize(("mode", "kept"), [("roll_back", [1, 9, 10, 11]), ("stop", [10, 11])])
def test_the_checkpoints_of_a_config_reach_back_if_the_guardrail_does(
    tmp_path: Path, mode: str, kept: list[int]
) -> None:
    sections: dict[str, Any] = {"checkpoint": {"keep": 2}, "guardrail": {"mode": mode}}
    store = Checkpoints.of(config(**sections), tmp_path, [])
    assert commit(store, *range(1, 12)).steps() == kept


@given(
    gaps=st.lists(st.integers(1, 5), min_size=1, max_size=60),
    keep=st.integers(1, 3),
    window=st.integers(1, 20),
)
def test_whenever_a_run_rolls_back_it_finds_a_checkpoint_at_most_two_windows_back(
    gaps: list[int], keep: int, window: int
) -> None:
    steps: list[int] = []
    for newest in itertools.accumulate(gaps):
        steps.append(newest)
        gone = superseded(steps, keep, window)
        steps = [step for step in steps if step not in gone]
        before = [step for step in steps if step <= newest - window]
        if newest - window >= gaps[0]:
            assert before[-1] >= newest - 2 * window - max(gaps)
        assert len(steps) <= keep + 2


def test_what_was_never_finished_is_not_loaded_and_is_removed(tmp_path: Path) -> None:
    store = written(tmp_path, 2)
    (store.begin(4) / CUT).write_text("{}")
    newest = store.newest(refused)
    assert newest.cut == cut(2)
    assert Checkpoints(tmp_path / "none", 2).newest(refused) is None
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step_2"]


def test_a_damaged_one_is_passed_over_with_a_message_and_kept_for_a_look(tmp_path: Path) -> None:
    store = written(tmp_path, 2, 4)
    (tmp_path / "step_4" / "trainer.safetensors").write_bytes(b"short")
    told: list[str] = []
    newest = store.newest(told.append)
    assert (newest.cut.step, store.steps()) == (2, [2])
    assert "trainer.safetensors was changed or cut off" in told[0]
    assert (tmp_path / "step_4.damaged").is_dir()
    (tmp_path / "step_2").rename(tmp_path / "step_9")
    with pytest.raises(CheckpointError, match=r"its cut\.json is of step 2"):
        load(tmp_path / "step_9")
    (tmp_path / "step_9" / "payload.pkl").write_bytes(b"")
    with pytest.raises(CheckpointError, match="missing or unexpected"):
        load(tmp_path / "step_9")


@pytest.mark.parametrize(
    ("name", "size", "error", "said"),
    [
        ("of_nobody", 1, OSError, "other files than the trainer wrote: .*of_nobody"),
        ("trainer.safetensors", 99, OSError, "other files than the trainer wrote: .*trainer.s"),
        ("trainer-1-of-2.safetensors", None, FileNotFoundError, "trainer-1-of-2"),
    ],
    ids=["one more", "another size", "the file of a rank is missing"],
)
def test_a_checkpoint_with_other_files_than_the_trainer_wrote_is_not_committed(
    name: str, size: int | None, error: type[Exception], said: str, tmp_path: Path
) -> None:
    store = written(tmp_path, 2)
    part = store.begin(4)

    (part / "trainer.safetensors").write_bytes(bytes(range(100)))
    files = {"trainer.safetensors": written_file(part / "trainer.safetensors")}
    if size is None:
        files[name] = WrittenFile(1, "")
    else:
        (part / name).write_bytes(bytes(size))
    with pytest.raises(error, match=said):
        store.commit(part, cut(4), "{}", files)
    assert store.steps() == [2]
    assert store.begin(4) != part  # a rank that was given up may write there at any time
    assert store.begun() == {2, 4}


@given(st.data())
def test_no_changed_byte_and_no_lost_end_is_loaded_as_something_else(data: st.DataObject) -> None:
    with tempfile.TemporaryDirectory() as name:
        written(Path(name), 2)
        folder = Path(name) / "step_2"
        file = folder / data.draw(st.sampled_from(sorted(p.name for p in folder.iterdir())))
        content = bytearray(file.read_bytes())
        at = data.draw(st.integers(0, len(content) - 1))
        if data.draw(st.booleans()):
            content[at] ^= data.draw(st.integers(1, 255))
        else:
            del content[at:]
        file.write_bytes(bytes(content))
        try:
            found = load(folder)
        except CheckpointError:
            return
        assert file.name == MANIFEST  # blanks between its entries mean nothing
        assert found.cut == cut(2)


ROWS = [[Row("0:0", "a", "1+1=", "2", {})]]


@pytest.mark.parametrize(
    ("changes", "key"),
    [
        ({"student": {"model": "other"}}, "student.model"),
        ({"train": {"batch_size": 64}}, "train.batch_size"),
        ({"data": {"train": "others.jsonl"}}, "data.train"),
        ({"loss": {"kind": "k1"}}, "loss.kind"),
        ({"async": {"sync_steps": 8}}, "async.sync_steps"),
        ({"seed": 1}, "seed"),
        ({"rollout": {"n": 2}}, "rollout.n"),
        ({"teachers": {"t": {"model": "b"}}}, "teachers.t.model"),
    ],
)
def test_what_is_learned_may_not_change(changes: dict[str, Any], key: str) -> None:
    with pytest.raises(ConfigError) as caught:
        refuse_changes(identity(config(), ROWS), identity(config(**changes), ROWS))
    assert key in [problem.key for problem in caught.value.problems]


@pytest.mark.parametrize(
    ("before", "cause"),
    [
        (identity(config(), [[Row("0:0", "a", "1+2=", "3", {})]]), "the files hold other rows"),
        (json.dumps({"config": {"no": "config"}, "data": ""}), "not one of this version"),
    ],
    ids=["other rows", "another version"],
)
def test_other_rows_and_configs_of_another_version_are_refused(before: str, cause: str) -> None:
    with pytest.raises(ConfigError, match=cause):
        refuse_changes(before, identity(config(), ROWS))


@pytest.mark.parametrize(
    "changes",
    [
        {"rollout": {"replicas": 3, "concurrency": 8}},
        {"teachers": {"t": {"model": "t", "replicas": 2, "engine": {"max_num_seqs": 8}}}},
        {"timeouts": {"stall_s": 5}, "log": {"wandb": "off"}, "run_dir": "d", "name": "n"},
        {"train": {"attention": "sdpa", "peak_tflops": 900.0}},
        {"checkpoint": {"every": 1}, "queue": {"max_mib": 7}, "eval": {"every": 0}},
    ],
)
def test_where_and_how_fast_may_change(changes: dict[str, Any]) -> None:
    refuse_changes(identity(config(), ROWS), identity(config(**changes), ROWS))
    before = json.loads(identity(config(), ROWS))
    before["config"]["sync"]["tries"] = 5  # a key that was removed since
    refuse_changes(json.dumps(before), identity(config(**changes), ROWS))


def test_what_was_logged_after_the_checkpoint_is_cut(tmp_path: Path) -> None:
    lines = [{"step": s, "time": 1.0, "loss": float(s), "nothing": None} for s in (0, 1, 2, 3)]
    text = "".join(json.dumps(line) + "\n" for line in lines) + '{"step": 4, "lo'
    (tmp_path / "metrics.jsonl").write_text(text)
    (tmp_path / "dead_letters.jsonl").write_text("1\n345")  # torn within the checkpoint's 5 bytes
    cut_files(tmp_path, cut(3))
    assert (tmp_path / "dead_letters.jsonl").read_text() == "1\n"
    (tmp_path / "dead_letters.jsonl").write_text("1234\n6789\n")
    (tmp_path / "microscope").mkdir()
    for step in (1, 2, 3):
        (tmp_path / "microscope" / f"step_{step:06d}.rank_1.npz").touch()
    assert cut_files(tmp_path, cut(2)) == {"loss": 2.0, "ledger/dead_lettered": 1.0}
    kept = (tmp_path / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in kept] == [0, 1, 2]
    assert (tmp_path / "dead_letters.jsonl").read_text() == "1234\n"
    left = sorted(path.name for path in (tmp_path / "microscope").iterdir())
    assert left == ["step_000001.rank_1.npz", "step_000002.rank_1.npz"]


def test_evaluations_after_the_checkpoint_are_cut_with_their_files(tmp_path: Path) -> None:
    lines = [
        {"step": 0, "eval_initial/a/accuracy": 0.1, "eval_initial/newest_version": 0},
        {"step": 4, "eval/a/accuracy": 0.2, "eval/newest_version": 2},
        {"step": 8, "eval/a/accuracy": 0.3, "eval/newest_version": 3},
        {"step": 12, "eval/a/accuracy": 0.4, "eval/newest_version": 3},
    ]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (tmp_path / EVALS).mkdir()
    for name in ("step_0", "step_4", "step_8", "step_12", "teachers"):
        (tmp_path / EVALS / f"{name}.jsonl").touch()
    assert cut_files(tmp_path, cut(8))["eval/a/accuracy"] == 0.2
    assert evaluated_steps(tmp_path) == {4}
    left = sorted(path.stem for path in (tmp_path / EVALS).iterdir())
    assert left == ["step_0", "step_4", "teachers"]


def test_without_a_checkpoint_everything_is_cut(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text('{"step": 0, "loss": 1.0}\n')
    for name in (f"{EVALS}/step_0.jsonl", "microscope/step_000001.rank_1.npz"):
        (tmp_path / name).parent.mkdir()
        (tmp_path / name).touch()
    assert cut_files(tmp_path, None) == {}
    assert not list((tmp_path / EVALS).iterdir())
    assert not list((tmp_path / "microscope").iterdir())
    assert (tmp_path / "metrics.jsonl").read_text() == ""
