"""A student in its place: what is made of the settings of its run."""

from __future__ import annotations

from typing import Literal

import pytest
import torch

from async_opd.config.sections.loss import ForwardKLConfig
from async_opd.config.sections.train import TrainConfig
from tests.trainer.models import tiny_model
from trainer.losses import build_objective
from trainer.student.placed import PlacedStudent


@pytest.mark.parametrize(("compiles", "expected"), [(True, "compiled"), ("auto", "eager")])
def test_layers_are_compiled_where_the_config_says_so(
    compiles: Literal["auto"] | bool, expected: str
) -> None:
    train = TrainConfig(compile=compiles, attention="sdpa")
    objective = build_objective(ForwardKLConfig())
    placed = PlacedStudent(tiny_model(), objective, train, torch.device("cpu"))
    assert placed.kernels()["decoder layers"] == expected
