"""How a run ends when it is interrupted at an awkward moment."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from async_opd.core.checkpoint import Checkpoints
from async_opd.core.claim import claimed
from async_opd.core.errors import ConfigError
from async_opd.core.preflight import Inputs
from async_opd.core.resume import identity
from async_opd.run import _start, _unbroken, run
from tests.core.test_checkpoint import ROWS, config, cut


async def test_a_signal_during_the_final_save_waits_for_the_model() -> None:
    saved: list[str] = []

    async def save() -> None:
        await asyncio.sleep(0.05)
        saved.append("model")

    work = asyncio.create_task(_unbroken(save()))
    await asyncio.sleep(0)
    work.cancel()
    with pytest.raises(asyncio.CancelledError):
        await work
    assert saved == ["model"]


def kept(run_dir: Path, config_text: str) -> None:
    store = Checkpoints(run_dir / "checkpoints", 2)
    store.commit(store.begin(4), cut(4), config_text)


def test_a_run_directory_with_checkpoints_is_not_used_for_another_run(tmp_path: Path) -> None:
    kept(tmp_path, "{}")
    with pytest.raises(ConfigError, match="holds checkpoints of an earlier run"):
        run(config(run_dir=str(tmp_path)), Inputs(ROWS))


def test_two_runs_do_not_share_a_run_directory(tmp_path: Path) -> None:
    for resume in (False, True):
        with claimed(tmp_path), pytest.raises(ConfigError, match="a run is going on"):
            run(config(run_dir=str(tmp_path)), Inputs(ROWS), resume)


def test_a_resumed_run_starts_at_its_newest_checkpoint(tmp_path: Path) -> None:
    inputs = Inputs(ROWS)
    kept(tmp_path, identity(config(), ROWS))
    told: list[str] = []
    start = _start(config(), inputs, tmp_path, True, told.append)
    assert start is not None
    assert (start.cut.step, told) == (4, ["going on after step 4, weight version 1"])


def test_another_config_is_refused_with_its_keys(tmp_path: Path) -> None:
    kept(tmp_path, identity(config(), ROWS))
    other = config(train={"batch_size": 64}, seed=3)
    with pytest.raises(ConfigError) as caught:
        _start(other, Inputs(ROWS), tmp_path, True, print)
    assert [problem.key for problem in caught.value.problems] == ["seed", "train.batch_size"]


def test_without_a_checkpoint_it_starts_from_the_beginning_and_says_so(tmp_path: Path) -> None:
    told: list[str] = []
    assert _start(config(), Inputs(ROWS), tmp_path, True, told.append) is None
    assert "the run starts from the beginning" in told[0]


def test_a_completed_run_is_left_alone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "summary.json").write_text('{"status": "completed"}')
    (tmp_path / "model").mkdir()
    assert run(config(run_dir=str(tmp_path)), Inputs(ROWS), resume=True) == 0
    assert "is completed already" in capsys.readouterr().out
