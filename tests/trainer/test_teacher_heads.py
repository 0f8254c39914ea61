"""Teachers' heads: what is read from their files, and full-vocabulary training with them."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest
import torch

from async_opd.config.sections.loss import ForwardKLConfig, JSDConfig, ReverseKLConfig
from async_opd.config.sections.train import TrainConfig
from async_opd.core.errors import StageError
from async_opd.core.samples import Sample
from async_opd.core.scores import HiddenStates, SampledLogprobs
from teachers.meter import ScoringMeter
from tests.trainer import families
from tests.trainer.models import VOCABULARY, random_sample, tiny_model
from trainer.batches.packing import pack
from trainer.learner import Learner
from trainer.losses import build_objective
from trainer.rank import BackwardResult, Rank
from trainer.teacher_heads import TeacherHead, read_head

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


def test_a_head_among_several_files_is_found(tmp_path: Path) -> None:
    model = teacher(tied=False)
    directory = saved(model, tmp_path, max_shard_size="8KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 1
    head = read_head("t", directory, torch.float32, 10**6, CPU)
    assert torch.equal(head.weight, model.lm_head.weight)


def test_only_the_rows_that_the_student_has_are_resident(tmp_path: Path) -> None:
    head = read_head("t", saved(teacher(), tmp_path), torch.bfloat16, 20, CPU)
    assert head.weight.shape == (20, 48)
    assert head.weight.untyped_storage().nbytes() == 20 * 48 * 2


def test_a_model_without_a_head_is_refused(tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    saved(teacher(tied=False), tmp_path)
    file = tmp_path / "model.safetensors"
    tensors = {k: v for k, v in load_file(file).items() if "lm_head" not in k}
    save_file(tensors, file)
    with pytest.raises(StageError, match="expected one output head"):
        read_head("math", str(tmp_path), torch.float32, 10**6, CPU)


def test_logits_changed_in_an_unknown_way_are_refused(tmp_path: Path) -> None:
    saved(teacher(), tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"dim_model_base": 256}))
    with pytest.raises(StageError, match="dim_model_base"):
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
    ids = np.concatenate([rollout.prompt.token_ids, rollout.response_ids])
    with torch.no_grad():
        states = model.base_model(torch.from_numpy(ids).long()[None]).last_hidden_state[0]
    return Sample(rollout, as_bits(states[len(rollout.prompt.token_ids) - 1 : -1], dtype))


def head_of(model: Any, name: str) -> TeacherHead:
    return TeacherHead(name, model.get_output_embeddings().weight.detach())


def learner(heads: dict[str, TeacherHead], config: Any = None, **train: Any) -> Learner:
    config = config or ForwardKLConfig(support="full_vocab")
    settings = TrainConfig.model_validate({"warmup_steps": 0, **train})
    return Learner(Rank(tiny_model(), build_objective(config), settings, CPU, heads))


def exact(kind: str, batch: list[Sample], teachers: dict[str, Any]) -> float:
    """Mean over response tokens, from both whole models, in float64."""
    student = tiny_model().double().eval()
    values = []
    for sample in batch:
        rollout = sample.rollout
        ids = torch.from_numpy(
            np.concatenate([rollout.prompt.token_ids, rollout.response_ids])
        ).long()[None]
        with torch.no_grad():
            q, p = (
                m(ids).logits[0, len(rollout.prompt.token_ids) - 1 : -1].double().log_softmax(-1)
                for m in (student, teachers[rollout.prompt.teacher])
            )
        first, second = (p, q) if kind == "forward_kl" else (q, p)
        values.append((first.exp() * (first - second)).sum(-1))
    return float(torch.cat(values).mean())


def gap_of(sample: Sample, model: Any, temperature: float) -> torch.Tensor:
    """log p^(1/T) / Z - log q(rollout) of each sampled token, [R] in float64."""
    rollout = sample.rollout
    ids = np.concatenate([rollout.prompt.token_ids, rollout.response_ids])
    with torch.no_grad():
        logits = model(torch.from_numpy(ids).long()[None]).logits[0].double()
    table = (logits[len(rollout.prompt.token_ids) - 1 : -1] / temperature).log_softmax(-1)
    own = table.gather(1, torch.from_numpy(rollout.response_ids).long()[:, None])[:, 0]
    return own - torch.from_numpy(rollout.rollout_logprobs).double()


@pytest.mark.parametrize(
    ("kind", "config"),
    [
        ("forward_kl", ForwardKLConfig(support="full_vocab")),
        ("reverse_kl", ReverseKLConfig(kind="reverse_kl", support="full_vocab")),
    ],
)
@pytest.mark.parametrize("budget", [8, 10**6])
def test_two_teachers_in_one_batch_are_exact(kind: str, config: Any, budget: int) -> None:
    teachers = {"wide": teacher(), "narrow": teacher(tied=False, hidden=24)}
    batch = [
        scored(teachers[name], index, size, name)
        for index, (name, size) in enumerate(
            [("wide", 5), ("narrow", 3), ("wide", 0), ("narrow", 1), ("wide", 4)]
        )
    ]
    heads = {name: head_of(model, name) for name, model in teachers.items()}
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


def test_a_teacher_without_tokens_has_no_agreement() -> None:
    model = teacher()
    batch = [scored(model, 0, 0, "t"), scored(model, 1, 2, "u")]
    made = learner({name: head_of(model, name) for name in "tu"})
    found = made.train_batch(batch).metrics
    assert "teacher/u/agreement" in found
    assert "teacher/t/agreement" not in found


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


def test_a_larger_padding_of_the_teacher_is_left_out() -> None:
    padded = teacher(vocabulary=VOCABULARY + 8)
    batch = [scored(padded, 0, 5, "t")]
    full = head_of(padded, "t")
    cut = TeacherHead("t", full.weight[:VOCABULARY])
    losses = [learner({"t": head}).train_batch(batch).metrics["loss/total"] for head in (full, cut)]
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)


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


def test_full_vocabulary_forward_kl_falls() -> None:
    model = teacher()
    batch = [scored(model, i, 6, "t") for i in range(4)]
    made = learner({"t": head_of(model, "t")}, lr=1e-2)
    losses = [made.train_batch(batch).metrics["loss/total"] for _ in range(20)]
    assert losses[-1] < 0.5 * losses[0]
