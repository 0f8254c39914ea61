"""Loading the student: what it computes with, what is refused."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from async_opd.config.run_config import RunConfig
from async_opd.config.sections.engine import EngineConfig
from async_opd.config.sections.rollout import StudentConfig
from async_opd.core.errors import StageError
from async_opd.models.lm_head import LogitShape
from tests.trainer import families
from tests.trainer.models import random_sample, tiny_model
from tests.world.config import run_config
from trainer.build import build_learner
from trainer.student.check import _Probe, check_student
from trainer.student.loss_module import DecoderAndHead

CPU = torch.device("cpu")


def config(quickstart: str, **train: Any) -> RunConfig:
    models = f"{quickstart}/models"
    return run_config(
        student={"model": f"{models}/student"},
        teachers={"sort": {"model": f"{models}/teacher-sort"}},
        train=train,
    )


def test_the_quickstarts_student_is_built_in_float32(quickstart: str) -> None:
    model = build_learner(config(quickstart), "cpu").model
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}


def test_a_student_of_other_layers_is_built_and_trained(quickstart: str, tmp_path: Path) -> None:
    path = str(tmp_path / "gemma4")
    families.gemma4().save_pretrained(path)
    made = config(quickstart, lr=1e-2).model_copy(update={"student": StudentConfig(model=path)})
    learner = build_learner(made, "cpu")
    batch = [random_sample(i, 4 + i, k=6) for i in range(3)]
    reports = [learner.train_batch(batch) for _ in range(3)]
    assert reports[2].metrics["loss/total"] < reports[0].metrics["loss/total"]
    assert all(report.metrics["train/tflops"] > 0 for report in reports)


@pytest.mark.parametrize(
    ("engine", "expected"),
    [
        ({}, torch.float32),
        ({"dtype": "float16"}, torch.float16),
        ({"extra": {"dtype": "half"}}, torch.float16),
    ],
)
def test_weights_are_sent_in_the_dtype_of_the_engines(
    quickstart: str, engine: dict[str, Any], expected: torch.dtype
) -> None:
    found = config(quickstart)
    rollout = found.rollout.model_copy(update={"engine": EngineConfig(**engine)})
    learner = build_learner(found.model_copy(update={"rollout": rollout}), "cpu")
    assert {weight.dtype for _, weight in learner.named_weights()} == {expected}


def test_the_check_computes_where_the_model_is() -> None:
    """On a GPU a model is not on the CPU first; here ``meta`` stands for one."""
    head = torch.nn.Linear(4, 32, device="meta")
    seen = set()

    class Model:
        config = tiny_model().config
        get_output_embeddings = staticmethod(lambda: head)

        def __call__(self, input_ids: torch.Tensor, position_ids: torch.Tensor, **_: Any) -> Any:
            seen.update((input_ids.device.type, position_ids.device.type))
            states = torch.empty((*input_ids.shape, 4), device="meta")
            return SimpleNamespace(last_hidden_state=states, logits=head(states))

    model = Model()
    probe = _Probe.of(model, 32, None)
    probe.packed_logits(DecoderAndHead(model, head, LogitShape()))
    probe.logits_alone(model)
    assert seen == {"meta"}


def test_a_state_that_leaks_between_packed_samples_is_refused() -> None:
    sizes = {"vocab_size": 32, "hidden_size": 16, "state_size": 4, "num_hidden_layers": 1}
    sizes |= {"time_step_rank": 2, "initializer_range": 1.0}
    with pytest.raises(StageError, match="cannot be packed"):
        check_student(families.plain("Mamba", **sizes))


def test_weights_that_are_not_finite_are_refused() -> None:
    model = tiny_model()
    with torch.no_grad():
        model.model.norm.weight.fill_(torch.nan)
    with pytest.raises(StageError, match="nan"):
        check_student(model)


def test_a_rank_sets_its_threads_by_the_student_that_it_trains(
    quickstart: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[int] = []
    monkeypatch.setattr("trainer.build.torch.set_num_threads", seen.append)
    for threads in (3, "auto"):
        build_learner(config(quickstart, threads=threads), "cpu")
    assert seen == [3, 1]
