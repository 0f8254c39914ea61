"""Values that are not what a key is for are named in the result: no importer fails at one."""

from __future__ import annotations

from datetime import date
from typing import Any

import pytest

from async_opd.tools.importing.command import written
from async_opd.tools.importing.frameworks import FRAMEWORKS, drafted

ODD: list[Any] = [{"a"}, b"x", date(2026, 11, 27), 1j]
ODD += ["${VAR}", "", "abc", None, 0, -1, float("inf"), float("nan"), [], ["x"], True]
BASES: list[dict[str, Any]] = [{}, {"pipeline.scheduling_mode": "fully_async"}]
BASES += [{"trainer.optim.scheduler": "cosine", "trainer.scheduler.type": "cosine"}]


@pytest.mark.slow
@pytest.mark.parametrize("name", FRAMEWORKS)
def test_no_value_of_any_key_fails_the_import(name: str) -> None:
    framework, failed = FRAMEWORKS[name], {}
    for key in framework.table:
        for value in ODD:
            for base in BASES:
                try:
                    draft = drafted(framework, {**base, key.replace("*", "one"): value})
                    if base == BASES[0]:
                        written(draft, "a", name, [])
                except Exception as error:
                    failed[key, str(value)] = repr(error)
    assert failed == {}
