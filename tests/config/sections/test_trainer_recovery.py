"""``cluster.trainer_recovery: replica``, and the runs that cannot have it."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import ValidationError

from async_opd.config.run_config import RunConfig
from rollouter.spec import StudentEngineSpec
from tests.world.config import run_config


def recovering(**sections: Any) -> RunConfig:
    given = {"cluster": {"trainer_recovery": "replica"}, "sync": {"verify_every": 1}}
    return run_config(**given | sections)


@pytest.mark.parametrize("evaluates", [False, True])
def test_rollout_replicas_alone_keep_their_weights(
    evaluates: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rollouter.spec.is_vision_model", lambda model: False)
    given = ("cpu", (), "student/0", 0, 0, None, evaluates)
    assert StudentEngineSpec.of(recovering(), *given).keeps_weights == (not evaluates)
    assert not StudentEngineSpec.of(run_config(), *given).keeps_weights


@pytest.mark.parametrize(
    ("sections", "key"),
    [
        (
            {"rollout": {"engine": {"quantization": "fp8_per_channel"}}},
            "rollout.engine.quantization",
        ),
        (
            {"sync": {"verify_every": 1, "fake_quantization": "mxfp4"}},
            "sync.fake_quantization",
        ),
        ({"train": {"lora": {"rank": 4}}}, "train.lora"),
        ({"sync": {"verify_every": 0}}, "sync.verify_every"),
        ({"sync": {"verify_every": 2}}, "sync.verify_every"),
        ({"supervision": {"max_restarts": 0}}, "supervision.max_restarts"),
        (
            {
                "teachers": {
                    name: {"model": name, "weight": "auto", "sources": [name]} for name in "ab"
                }
            },
            "teachers.a.weight",
        ),
    ],
)
def test_what_a_replica_cannot_give_back_is_refused(sections: dict[str, Any], key: str) -> None:
    words = f"cluster.trainer_recovery: found replica, but {key} excludes it: "
    with pytest.raises(ValidationError, match=words):
        recovering(**sections)
