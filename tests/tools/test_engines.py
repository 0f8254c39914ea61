"""The engines that a tool starts: configs of a single teacher, and the wait for their answers."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from async_opd.cluster import launch_parts
from async_opd.config.load import load_config
from async_opd.config.run_config import RunConfig
from async_opd.config.sections.teachers import VllmTeacher
from async_opd.core.errors import StageTimeout
from async_opd.core.reports import Progress
from async_opd.tools.engines import (
    ITSELF,
    ToolEngines,
    with_itself_as_teacher,
    with_one_teacher,
    with_whole_teacher,
)
from tests.world.config import run_config


class Hangs:
    """Engines that compute no token."""

    async def run(self) -> None:
        await asyncio.Event().wait()

    async def progress(self) -> Progress:
        return Progress(0)


@asynccontextmanager
async def hanging(*_: Any, **__: Any) -> AsyncIterator[Hangs]:
    yield Hangs()


async def test_engines_that_compute_no_token_are_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch_parts, "launch_evaluators", hanging)
    config = run_config(timeouts={"stall_s": 0.1})
    asking = ToolEngines("cpu", (), print).of_student(config, "probe", lambda one: one.run(), 1)
    with pytest.raises(StageTimeout, match=r"probe: .* no new token for 0\.1 s"):
        await asyncio.wait_for(asking, 10)


EXAMPLE = Path(__file__).parents[2] / "examples" / "vision.yaml"
READS = "reads: {model: /no, sources: [sort], engine: {max_model_len: 64}%s}"
SEES = "sees: {model: /no, sources: [count], engine: {max_model_len: 512}}"
SERVED = "sees: {kind: endpoint, urls: ['http://h'], served_model: m, sources: [count]}"


def config(*teachers: str) -> RunConfig:
    return load_config(EXAMPLE, [f"teachers={{{', '.join(teachers)}}}"])


def longest(made: RunConfig) -> object:
    """``max_model_len`` of the engine in which the student is the teacher."""
    assert list(made.teachers) == [ITSELF]
    return made.teachers[ITSELF].engine.max_model_len  # type: ignore[union-attr]


def test_the_student_is_scored_in_an_engine_like_the_first_teachers() -> None:
    assert longest(with_itself_as_teacher(config(READS % "", SEES))) == 64


def test_the_student_is_scored_in_the_engine_of_a_teacher_whose_prompts_have_images() -> None:
    assert longest(with_itself_as_teacher(config(READS % "", SEES), {"count"})) == 512


def test_teachers_on_servers_have_no_engine_to_be_like() -> None:
    assert longest(with_itself_as_teacher(config(SERVED, READS % ""), {"count"})) == 64


def test_with_servers_only_the_engine_is_like_the_rollouts() -> None:
    made = with_itself_as_teacher(config(SERVED))
    teacher = made.teachers[ITSELF]
    assert teacher.engine == made.rollout.engine  # type: ignore[union-attr]


def test_one_teacher_alone_shares_no_gpu() -> None:
    shared = ", placement: colocated, with: rollout"
    made = with_one_teacher(config(READS % shared, SEES), "reads")
    (teacher,) = made.teachers.values()
    assert (list(made.teachers), teacher.host) == (["reads"], None)


def test_the_student_is_scored_in_no_quantized_engine() -> None:
    low = "reads: {model: /no, engine: {quantization: fp8_per_channel, max_num_seqs: 3}}"
    itself = with_itself_as_teacher(config(low)).teachers[ITSELF]
    engine = itself.engine  # type: ignore[union-attr]
    assert (engine.quantization, engine.max_num_seqs) == (None, 3)


@pytest.mark.parametrize(
    "engine",
    [
        "quantization: fp8_per_channel",
        "kv_cache_dtype: fp8",
        "extra: {quantization: mxfp4, seed: 3}",
        "extra: {kv_cache_dtype: fp8_e5m2}",
    ],
)
def test_a_teacher_of_low_precision_is_whole_without_its_quantization(engine: str) -> None:
    low = config(f"reads: {{model: /no, sources: [sort], replicas: 2, engine: {{{engine}}}}}", SEES)
    whole = with_whole_teacher(low, "reads")
    assert whole is not None
    (teacher,) = whole.teachers.values()
    assert isinstance(teacher, VllmTeacher)
    assert not teacher.engine.low_precision
    assert set(teacher.engine.extra) <= {"seed"}
    assert (teacher.model, teacher.replicas) == ("/no", 1)


def test_other_teachers_are_whole_as_they_are() -> None:
    itself = "anchor: {kind: self, sources: [sort], engine: {quantization: fp8_per_channel}}"
    teachers = config(itself, SERVED)
    assert with_whole_teacher(teachers, "anchor") is None
    assert with_whole_teacher(teachers, "sees") is None
    assert with_whole_teacher(config(READS % "", SEES), "reads") is None


async def test_an_evaluation_is_closed_in_the_loop_of_its_engines_though_they_fail(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It has started the processes of the graders."""

    def close() -> None:
        closed_in.append(asyncio.get_running_loop())

    closed_in = list[asyncio.AbstractEventLoop]()
    monkeypatch.setattr(launch_parts, "launch_evaluators", hanging)
    evaluation: Any = SimpleNamespace(
        requests=1, close=close, run=lambda *_: asyncio.Event().wait()
    )
    engines, config = ToolEngines("cpu", (), print), run_config(timeouts={"stall_s": 0.1})
    with pytest.raises(StageTimeout):
        await asyncio.wait_for(engines.evaluated(config, evaluation, "answers", False), 10)
    assert closed_in == [asyncio.get_running_loop()]
