"""Values that are not what a key is for are named in the result: no importer fails at one."""

from __future__ import annotations

from typing import Any

import pytest

from async_opd.tools.importing.common import finish
from async_opd.tools.importing.draft import Draft
from async_opd.tools.importing.frameworks import FRAMEWORKS, Framework

ODD: list[Any] = ["${VAR}", "", "abc", None, 0, -1, float("inf"), float("nan"), [], ["x"], True]
BASES: list[dict[str, Any]] = [{}, {"pipeline.scheduling_mode": "fully_async"}]
BASES += [{"trainer.optim.scheduler": "cosine", "trainer.scheduler.type": "cosine"}]


def drafted(framework: Framework, keys: dict[str, Any]) -> Draft:
    draft = Draft(keys)
    draft.apply(framework.table)
    framework.together(draft)
    finish(draft)
    draft.finish(framework.table)
    return draft


@pytest.mark.slow
@pytest.mark.parametrize("name", FRAMEWORKS)
def test_no_value_of_any_key_fails_the_import(name: str) -> None:
    framework, failed = FRAMEWORKS[name], {}
    for key in framework.table:
        for value in ODD:
            for base in BASES:
                try:
                    drafted(framework, {**base, key.replace("*", "one"): value})
                except Exception as error:
                    failed[key, str(value)] = repr(error)
    assert failed == {}
