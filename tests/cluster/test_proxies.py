"""A proxy's methods have the types of the stage's own, and reach it as they were called."""

from __future__ import annotations

import asyncio
import gc
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from mypy import api

from async_opd.cluster import proxies
from async_opd.cluster.actor_shell import ActorShell
from async_opd.cluster.proxies import Proxy, TrainerProxy, remote
from async_opd.core.errors import StageTimeout

PROXIES = Path(proxies.__file__)

USE = """
from async_opd.cluster.proxies import Proxy, remote

class Stage:
    async def score(self, rows: list[int], fast: bool = False) -> float:
        return 0.5

class StageProxy(Proxy):
    score = remote(Stage.score)
    scores = remote(Stage.scores)  # has no attribute "scores"

async def use(stage: StageProxy) -> None:
    right: float = await stage.score([1], fast=True)
    await stage.score(["a"])  # incompatible type "str"
    await stage.score([1], slow=True)  # Unexpected keyword argument "slow"
    await stage.score()  # Too few arguments
    wrong: str = await stage.score([1])  # Incompatible types in assignment
"""


@pytest.fixture
def process_settings() -> Iterator[None]:
    """Undoes what mypy sets for its whole process.

    With mypy's recursion limit of 16384 a later test of deeply nested YAML takes 20 s, not 1 s.
    """
    limit, thresholds = sys.getrecursionlimit(), gc.get_threshold()
    yield
    sys.setrecursionlimit(limit)
    gc.set_threshold(*thresholds)


@pytest.mark.slow
@pytest.mark.usefixtures("process_settings")
def test_what_the_stage_does_not_have_is_a_type_error(tmp_path: Path) -> None:
    source = tmp_path / "use_of_a_proxy.py"
    source.write_text(USE)
    options = ["--strict", "--follow-imports=skip", f"--cache-dir={tmp_path}", "--config-file="]
    found, errors, _ = api.run([*options, str(PROXIES), str(source)])
    assert not errors
    said = re.findall(rf"{source.name}:(\d+): error: (.*)", found)
    expected = [
        (str(number), line.partition("  # ")[2])
        for number, line in enumerate(USE.splitlines(), 1)
        if "  # " in line
    ]
    assert [number for number, _ in said] == [number for number, _ in expected]
    assert all(words in text for (_, text), (_, words) in zip(said, expected, strict=True))


class Stage:
    async def score(self, rows: list[int], fast: bool = False) -> tuple[list[int], bool]:
        return rows, fast


class StageProxy(Proxy):
    score = remote(Stage.score, 5.0)
    again = remote(Stage.score, again=True)


class Process:
    """What a proxy needs of a ``Remote``: an ActorShell in this process."""

    def __init__(self) -> None:
        self.host = ActorShell()
        self.bounds: list[tuple[float | None, bool]] = []

    async def call(
        self, method: str, *args: Any, timeout_s: float | None, retry: bool, **named: Any
    ) -> Any:
        self.bounds.append((timeout_s, retry))
        return await self.host.call(method, args, named)


class TestCalls:
    async def test_arguments_by_name_arrive_by_name_and_with_the_bound_of_the_method(self) -> None:
        process: Any = Process()
        await process.host.build(f"{__name__}:Stage", ())
        stage = StageProxy(process)
        assert await stage.score([1], fast=True) == ([1], True)
        assert await stage.again([2]) == ([2], False)
        assert process.bounds == [(5.0, False), (None, True)]

    @pytest.mark.parametrize("method", ["save", "restore"])
    async def test_what_moves_the_trainers_bytes_is_bounded_by_them(self, method: str) -> None:
        class Hanging:
            async def call(self, *_: Any, **__: Any) -> Any:
                await asyncio.Event().wait()

        hanging: Any = Hanging()
        trainer = TrainerProxy(hanging, state_s=0.01)
        with pytest.raises(StageTimeout, match=rf"{method} took longer than 0\.01 s") as error:
            await getattr(trainer, method)("folder")
        assert "checkpoint.min_mib_per_s" in error.value.remedy
