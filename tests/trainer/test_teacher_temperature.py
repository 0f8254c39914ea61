"""Full-vocabulary training with a teacher at a temperature: against float64 and autograd."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from async_opd.config.load import load_config
from async_opd.models.lm_head import LogitShape
from tests.trainer.oracle import DIVERGENCES, DOUBLE, Case, case, divergences, gradients, term
from trainer.losses import Objective
from trainer.losses.chunked import chunked_loss
from trainer.teacher_heads import TeacherHead, load_heads

EXAMPLE = Path(__file__).parents[2] / "examples" / "quickstart.yaml"


def loss_at(temperature: float, kind: str, x: Case, **options: Any) -> torch.Tensor:
    """The product's loss; both heads are the identity, and the states log p."""
    eye = torch.eye(x.logits.shape[-1], dtype=DOUBLE)
    heads = {"t": TeacherHead("t", eye, temperature=temperature, **options)}
    objective = Objective(term(DIVERGENCES[kind], None))
    return chunked_loss(x.logits, eye, None, objective, x.states().tokens, heads=heads)[0]


def tempered(x: Case, temperature: float) -> Case:
    """The same with p^(1/T) / Z for p."""
    p = x.teacher.exp() ** (1 / temperature)
    return Case(x.logits, (p / p.sum(-1, keepdim=True)).log(), x.tokens)


@pytest.mark.parametrize("temperature", [0.4, 1.0, 3.0])
@pytest.mark.parametrize("kind", DIVERGENCES)
def test_loss_and_gradient_are_those_of_the_tempered_teacher(kind: str, temperature: float) -> None:
    x = case()
    expected = divergences(kind, tempered(x, temperature), None, x.logits).sum()
    found = loss_at(temperature, kind, x)
    assert torch.allclose(found, expected)
    mine, autograd = gradients(found, expected, by=x.logits)
    assert torch.allclose(mine, autograd)


def test_temperature_1_changes_no_bit() -> None:
    x = case()
    eye = torch.eye(x.logits.shape[-1], dtype=DOUBLE)
    plain, tempered = TeacherHead("t", eye), TeacherHead("t", eye, temperature=1.0)
    both = [head.logits(x.teacher, torch.empty_like(x.teacher)) for head in (plain, tempered)]
    assert torch.equal(*both)


def test_a_hot_teacher_pulls_towards_the_uniform_distribution() -> None:
    x = case()
    q = x.logits.log_softmax(-1)
    uniform = (-torch.tensor(float(q.shape[-1])).log() - q).mean(-1).sum()
    assert torch.allclose(loss_at(1e8, "forward_kl", x), uniform, atol=1e-6)


def test_the_temperature_comes_after_the_cap_and_beside_the_scale() -> None:
    x = case()
    head = TeacherHead(
        "t", torch.eye(11, dtype=DOUBLE), shape=LogitShape(4.0, 2.0), temperature=0.5
    )
    found = head.logits(x.teacher, torch.empty_like(x.teacher))
    assert torch.allclose(found, 4 * 2 * (x.teacher / 2).tanh() / 0.5)


def test_teachers_of_one_model_share_its_weight_and_keep_their_own_temperature() -> None:
    model = EXAMPLE.parent / "quickstart" / "models" / "teacher-sort"
    config = load_config(
        EXAMPLE,
        [
            "loss={kind: forward_kl, support: full_vocab}",
            f"teachers.sort={{model: {model}, temperature: 2}}",
            f"teachers.reverse={{model: {model}, temperature: 0.5}}",
        ],
    )
    heads = load_heads(config, 128, torch.device("cpu"))
    found = {name: (head.name, head.temperature) for name, head in heads.items()}
    assert found == {"sort": ("sort", 2), "reverse": ("reverse", 0.5)}
    assert heads["sort"].weight is heads["reverse"].weight
