"""Teachers' heads: what is read from their files, and full-vocabulary training with them."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest
import torch

from async_opd.config.load import load_config
from async_opd.config.sections.loss import ForwardKLConfig, JSDConfig
from async_opd.config.sections.train import TrainConfig
from async_opd.core.errors import StageError
from async_opd.core.samples import Sample
from async_opd.core.scores import HiddenStates, SampledLogprobs
from async_opd.models.lm_head import LogitShape
from teachers.meter import ScoringMeter
from tests.trainer import families
from tests.trainer.models import VOCABULARY, random_sample, tiny_model
from tests.trainer.oracle import (
    DIVERGENCES,
    DOUBLE,
    Case,
    assert_same,
    case,
    config_of,
    divergences,
    term,
)
from trainer.batches.packing import pack
from trainer.learner import Learner
from trainer.losses import Objective, build_objective
from trainer.losses.chunked import chunked_loss
from trainer.losses.teacher_heads import TeacherHead, load_heads, read_head
from trainer.rank import BackwardResult, Rank
from trainer.student.placed import PlacedStudent

CPU = torch.device("cpu")


def saved(model: Any, directory: Path, **options: Any) -> str:
    model.save_pretrained(directory, **options)
    return str(directory)


def teacher(tied: bool = True, hidden: int = 48, vocabulary: int = VOCABULARY) -> Any:
    """A random Qwen3 of another width than the student."""
    return families.made(
        "Qwen3",
        vocab_size=vocabulary,
        hidden_size=hidden,
        num_hidden_layers=1,
        head_dim=16,
        tie_word_embeddings=tied,
    )


def phi() -> Any:
    model = families.made("Phi", num_key_value_heads=2)
    torch.nn.init.normal_(model.lm_head.bias)
    return model


MODELS = {
    "tied": teacher,
    "untied": lambda: teacher(tied=False),
    "soft-capped": families.gemma2,
    "scaled": families.granite,
    "with a bias": phi,
}


@pytest.mark.parametrize("kind", MODELS)
def test_the_head_gives_the_models_own_logits(kind: str, tmp_path: Path) -> None:
    model = MODELS[kind]()
    head = read_head("t", saved(model, tmp_path), torch.float32, 10**6, CPU)
    ids = torch.arange(9)[None]
    with torch.no_grad():
        states = model.base_model(ids).last_hidden_state[0]
        expected = model(ids).logits[0]
    found = head.logits(states, torch.empty(9, VOCABULARY))
    assert torch.allclose(found, expected, atol=1e-5)


def test_a_head_among_files_is_found_with_the_students_rows(tmp_path: Path) -> None:
    model = teacher(tied=False)
    directory = saved(model, tmp_path, max_shard_size="8KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 1
    head = read_head("t", directory, torch.float32, 10**6, CPU)
    assert torch.equal(head.weight, model.lm_head.weight)
    head = read_head("t", saved(teacher(), tmp_path / "one"), torch.bfloat16, 20, CPU)
    assert head.weight.shape == (20, 48)
    assert head.weight.untyped_storage().nbytes() == 20 * 48 * 2


def test_a_model_without_a_head_or_with_unknown_logits_is_refused(tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    saved(teacher(tied=False), tmp_path)
    file, config = tmp_path / "model.safetensors", tmp_path / "config.json"
    settings = json.loads(config.read_text())
    config.write_text(json.dumps(settings | {"dim_model_base": 256}))
    with pytest.raises(StageError, match="dim_model_base"):
        read_head("math", str(tmp_path), torch.float32, 10**6, CPU)
    config.write_text(json.dumps(settings))
    save_file({k: v for k, v in load_file(file).items() if "lm_head" not in k}, file)
    with pytest.raises(StageError, match="expected one output head"):
        read_head("math", str(tmp_path), torch.float32, 10**6, CPU)


# ── in the learner ─────────────────────────────────────────────────────────────────────────────


def as_bits(states: torch.Tensor, dtype: Literal["float32", "bfloat16"]) -> HiddenStates:
    if dtype == "bfloat16":
        return HiddenStates(states.bfloat16().view(torch.uint16).numpy(), dtype)
    return HiddenStates(states.numpy(), dtype)


def scored(model: Any, index: int, size: int, name: str, dtype: Any = "float32") -> Sample:
    """A sample with the hidden states of a teacher, response positions only."""
    sample = random_sample(index, size)
    rollout = replace(
        sample.rollout, prompt=replace(sample.rollout.prompt, teacher=name), uid=f"p{index}/0"
    )
    with torch.no_grad():
        ids = torch.from_numpy(rollout.token_ids).long()[None]
        states = model.base_model(ids).last_hidden_state[0]
    return Sample(rollout, as_bits(states[len(rollout.prompt.token_ids) - 1 : -1], dtype))


def head_of(model: Any, name: str) -> TeacherHead:
    return TeacherHead(name, model.get_output_embeddings().weight.detach())


def learner(heads: dict[str, TeacherHead], config: Any = None, **train: Any) -> Learner:
    config = config or ForwardKLConfig(support="full_vocab")
    settings = TrainConfig.model_validate({"warmup_steps": 0, **train})
    return Learner(Rank(PlacedStudent(tiny_model(), build_objective(config), settings, CPU, heads)))


def table_of(sample: Sample, model: Any, temperature: float = 1.0) -> torch.Tensor:
    """Log-probabilities [R, V] of the rows that predict the response, in float64."""
    rollout = sample.rollout
    with torch.no_grad():
        logits = model(torch.from_numpy(rollout.token_ids).long()[None]).logits[0].double()
    rows = logits[len(rollout.prompt.token_ids) - 1 : -1]
    return (rows / temperature).log_softmax(-1)


def exact(kind: str, batch: list[Sample], teachers: dict[str, Any]) -> float:
    """Mean over response tokens, from both whole models, in float64."""
    student = tiny_model().double().eval()
    values = []
    for sample in batch:
        q, p = (table_of(sample, m) for m in (student, teachers[sample.rollout.prompt.teacher]))
        first, second = (p, q) if kind == "forward_kl" else (q, p)
        values.append((first.exp() * (first - second)).sum(-1))
    return float(torch.cat(values).mean())


def gap_of(sample: Sample, model: Any, temperature: float) -> torch.Tensor:
    """log p^(1/T) / Z - log q(rollout) of each sampled token, [R] in float64."""
    rollout, table = sample.rollout, table_of(sample, model, temperature)
    own = table.gather(1, torch.from_numpy(rollout.response_ids).long()[:, None])[:, 0]
    return own - torch.from_numpy(rollout.rollout_logprobs).double()


@pytest.mark.parametrize("kind", ["forward_kl", "reverse_kl"])
@pytest.mark.parametrize("budget", [8, 10**6])
def test_two_teachers_in_one_batch_are_exact(kind: str, budget: int) -> None:
    teachers = {"wide": teacher(), "narrow": teacher(tied=False, hidden=24)}
    batch = [
        scored(teachers[name], index, size, name)
        for index, (name, size) in enumerate(
            [("wide", 5), ("narrow", 3), ("wide", 0), ("narrow", 1), ("wide", 4)]
        )
    ]
    heads = {name: head_of(model, name) for name, model in teachers.items()}
    config = config_of(kind, support="full_vocab")
    made = learner(heads, config, tokens_per_micro_batch=budget)
    loss = made.train_batch(batch).metrics["loss/total"]
    assert loss == pytest.approx(exact(kind, batch, teachers), abs=1e-4)


@pytest.mark.parametrize("budget", [8, 10**6])
def test_agreement_is_that_of_the_whole_models_for_each_teacher(budget: int) -> None:
    """Mean over a teacher's tokens of log p^(1/T) / Z - log q(rollout), from float64."""
    teachers = {"wide": teacher(), "narrow": teacher(tied=False, hidden=24)}
    heads = {
        "wide": replace(head_of(teachers["wide"], "wide"), temperature=2.0),
        "narrow": head_of(teachers["narrow"], "narrow"),
    }
    batch = [
        scored(teachers[name], index, size, name)
        for index, (name, size) in enumerate([("wide", 5), ("narrow", 3), ("wide", 0), ("wide", 4)])
    ]
    metrics = learner(heads, tokens_per_micro_batch=budget).train_batch(batch).metrics
    for name, temperature in (("wide", 2.0), ("narrow", 1.0)):
        gaps = [
            gap_of(sample, teachers[name], temperature)
            for sample in batch
            if sample.rollout.prompt.teacher == name
        ]
        expected = float(torch.cat(gaps).mean())
        assert metrics[f"teacher/{name}/agreement"] == pytest.approx(expected, abs=1e-4)


def test_agreement_has_the_definition_of_the_scoring_stage() -> None:
    """The same teacher, once by hidden states and once by log-probabilities."""
    model = teacher()
    batch = [scored(model, index, 4, "t") for index in range(3)]
    found = learner({"t": head_of(model, "t")}).train_batch(batch).metrics["teacher/t/agreement"]
    meter = ScoringMeter()
    for sample in batch:
        logprobs = (gap_of(sample, model, 1.0).numpy() + sample.rollout.rollout_logprobs).astype(
            np.float32
        )
        meter.add([Sample(sample.rollout, SampledLogprobs(logprobs))])
    counters = meter.report().counters
    assert found == pytest.approx(counters["gap"] / counters["gap_tokens"], abs=1e-4)


def test_hidden_states_travel_as_bfloat16_bits() -> None:
    model = teacher()
    heads = {"t": head_of(model, "t")}
    losses = [
        learner(heads).train_batch([scored(model, 0, 6, "t", dtype)]).metrics["loss/total"]
        for dtype in ("float32", "bfloat16")
    ]
    assert losses[0] == pytest.approx(losses[1], rel=0.05)
    assert losses[0] != losses[1]


def test_empty_and_one_token_responses_have_no_or_one_row_of_states() -> None:
    model = teacher()
    packed = pack([scored(model, i, size, "t") for i, size in enumerate([0, 1, 0])])
    (states,) = packed.tokens.teacher_states
    assert states.rows == slice(0, 1)


def test_samples_of_one_teacher_lie_side_by_side(monkeypatch: pytest.MonkeyPatch) -> None:
    model = teacher()
    batch = [scored(model, i, 2, name) for i, name in enumerate("abba")]
    made = learner({name: head_of(model, name) for name in "ab"}, JSDConfig(kind="jsd"))
    seen: list[Any] = []

    def kept(_: Rank, parts: Any, *given: Any) -> BackwardResult:
        seen.append(parts)
        return BackwardResult({}, 0.0)

    monkeypatch.setattr(Rank, "backward", kept)
    made.train_batch(batch)
    ((part,),) = seen
    assert [one.teacher for one in pack(part.samples).tokens.teacher_states] == ["a", "b"]


def test_states_of_another_width_are_refused() -> None:
    batch = [scored(teacher(hidden=24), 0, 3, "t")]
    with pytest.raises(StageError, match="24 columns, its head 48"):
        learner({"t": head_of(teacher(), "t")}).train_batch(batch)


def test_a_sampled_token_that_the_teacher_lacks_is_refused() -> None:
    small = teacher(vocabulary=VOCABULARY)
    head = TeacherHead("t", small.get_output_embeddings().weight.detach()[:4])
    with pytest.raises(StageError, match=r"p0/0 of teacher t has token \d+; the head has 4 rows"):
        learner({"t": head}).train_batch([scored(small, 0, 6, "t")])


# ── at a temperature: against float64 and autograd ─────────────────────────────────────────────

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
    assert_same(loss_at(temperature, kind, x), expected, by=x.logits, atol=1e-8)


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
