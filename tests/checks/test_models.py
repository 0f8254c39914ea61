"""Models that cannot be a run's: each with its key and a remedy."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest

from async_opd.checks.preflight import preflight
from async_opd.core.errors import Problem
from tests.checks.inputs import MODELS, broken_student, change, config, found, model, one

QUANTIZED = [
    "quantization: fp8_per_block",
    "quantization_config: {linear: fp8_per_block}",
    "hf_overrides: {quantization_config: {quant_method: fp8}}",
]
REFUSED = [
    ("student.model=/no/such/model", "student.model", "c.yaml: student.model: no such directory"),
    (f"student.model=/{'x' * 5000}", "student.model", "xxx"),
    ("loss.top_k=129", "loss.top_k", "128"),
    ("rollout.max_tokens=128", "rollout.max_tokens", "128"),
    ("eval.max_tokens=127", "eval.max_tokens", "→ at most 127 less the tokens"),
    ("train.attention=varlen", "train.attention", "GPUs only"),
    (
        "rollout.engine.extra={hf_overrides: {head_dtype: float32, rope_theta: 5}}",
        "rollout.engine.extra",
        "hf_overrides changes rope_theta of the student",
    ),
    *(
        (f"rollout.engine.extra={{{extra}}}", "rollout.engine.extra", words)
        for extra in QUANTIZED
        for words in ("rounding hides outdated weights", "→ set sync.verify_every: 0,")
    ),
]


@pytest.mark.parametrize(("override", "key", "words"), REFUSED)
def test_what_the_models_do_not_allow_is_one_problem(override: str, key: str, words: str) -> None:
    problem = one(override)
    assert problem.key == key
    assert words in str(problem)


SETTINGS: list[tuple[str, dict[str, Any], str]] = [
    ("teacher-sort", {"vocab_size": 64}, "vocabulary of 64"),
    ("student", {"head_dim": 48}, "head size 48"),
    ("student", {"per_layer_config": {"1": {"head_dim": 48}}}, "head size 48"),
    ("student", {"audio_config": {"hidden_size": 8}}, "audio_config"),
    ("student", {"is_encoder_decoder": True}, "an encoder"),
    ("student", {"model_type": "llama4_text"}, "in chunks"),
    ("student", {"layer_types": ["chunked_attention", "full_attention"]}, "in chunks"),
    ("student", {"dim_model_base": 64}, "dim_model_base"),
]


def key_of(name: str) -> str:
    return "student.model" if name == "student" else "teachers.sort.model"


@pytest.mark.parametrize(("name", "settings", "words"), SETTINGS)
def test_a_model_with_settings_that_no_run_takes_is_refused(
    name: str, settings: dict[str, Any], words: str, tmp_path: Path
) -> None:
    problem = one(f"{key_of(name)}={model(tmp_path, name, **settings)}")
    assert problem.key == key_of(name)
    assert words in problem.message


@pytest.mark.parametrize(
    ("name", "settings"),
    [("student", {"head_dim": None}), ("teacher-sort", {"vision_config": {"hidden_size": 8}})],
)
def test_a_model_with_settings_that_a_run_takes_has_no_problem(
    name: str, settings: dict[str, Any], tmp_path: Path
) -> None:
    assert found(f"{key_of(name)}={model(tmp_path, name, **settings)}") == []


def other_tokenizer(tmp_path: Path) -> Path:
    path = model(tmp_path, "teacher-sort")
    tokenizer = json.loads((path / "tokenizer.json").read_text())
    vocabulary = tokenizer["model"]["vocab"]
    a, b = "1", "2"
    vocabulary[a], vocabulary[b] = vocabulary[b], vocabulary[a]
    (path / "tokenizer.json").write_text(json.dumps(tokenizer))
    return path


def test_a_teacher_with_another_vocabulary_is_refused(tmp_path: Path) -> None:
    problem = one(f"teachers.sort.model={other_tokenizer(tmp_path)}")
    assert problem.key == "teachers.sort.model"
    assert "different tokenizers" in problem.message


def templated(tmp_path: Path, *eos: int) -> str:
    """The student, whose turns end with token 2; it ends responses with these."""
    path = model(tmp_path, "student")
    turn = "{% for m in messages %}{{ m.content }}<eos>{% endfor %}"
    (path / "chat_template.jinja").write_text(turn)
    change(path / "generation_config.json", {"eos_token_id": list(eos)})
    return f"student.model={path}"


def ending(tmp_path: Path, *eos: int) -> str:
    """The teacher, which ends responses with these."""
    path = model(tmp_path, "teacher-sort")
    change(path / "generation_config.json", {"eos_token_id": list(eos)})
    return f"teachers.sort.model={path}"


def test_a_student_that_names_no_end_of_sequence_is_refused(tmp_path: Path) -> None:
    path = model(tmp_path, "student", eos_token_id=None)
    change(path / "generation_config.json", {"eos_token_id": None})
    assert "eos_token_id" in one(f"student.model={path}").message


@pytest.mark.parametrize(("student", "teacher"), [((), (2, 5)), ((2, 6), (2, 5)), ((5,), (2,))])
def test_a_teacher_that_ends_turns_as_the_student_does_is_taken(
    student: tuple[int, ...], teacher: tuple[int, ...], tmp_path: Path
) -> None:
    """() is the student without a template. One of its own tokens is enough for a base model."""
    own = [templated(tmp_path, *student)] if student else []
    assert found(*own, ending(tmp_path, *teacher)) == []


@pytest.mark.parametrize(
    ("student", "words"),
    [((), "never to stop"), ((2, 5), "ends an assistant's turn with token 2"), ((2, 5), "→ add 2")],
)
def test_a_teacher_that_ends_turns_otherwise_is_refused(
    student: tuple[int, ...], words: str, tmp_path: Path
) -> None:
    """A token in common is not enough: the one that the template writes has to be."""
    own = [templated(tmp_path, *student)] if student else []
    (problem,) = found(*own, ending(tmp_path, 5))
    assert problem.key == "teachers.sort.model"
    assert words in str(problem)


def test_where_prompts_have_no_template_a_common_end_is_enough(tmp_path: Path) -> None:
    plain = (templated(tmp_path, 2, 5), "data.chat_template=never", ending(tmp_path, 5))
    assert "teachers.sort.model" not in {problem.key for problem in found(*plain)}


def test_a_model_without_weights_is_refused(tmp_path: Path) -> None:
    path = model(tmp_path, "student")
    (path / "model.safetensors").unlink()
    assert "no *.safetensors" in one(f"student.model={path}").message


def test_a_missing_shard_is_named(tmp_path: Path) -> None:
    path = model(tmp_path, "student")
    index = {"weight_map": {"a": "model.safetensors", "b": "model-2.safetensors"}}
    (path / "model.safetensors.index.json").write_text(json.dumps(index))
    (problem,) = found(f"student.model={path}")
    assert "model-2.safetensors" in problem.message


@pytest.mark.parametrize(
    ("name", "text"), [("config.json", "{"), ("tokenizer.json", "{}"), ("tokenizer.json", "{")]
)
def test_a_broken_model_file_is_a_problem(tmp_path: Path, name: str, text: str) -> None:
    problem = one(broken_student(tmp_path, name, text))
    assert (problem.key, problem.remedy) == ("student.model", "save the model again")


def test_a_top_k_above_a_teachers_vocabulary_is_refused(tmp_path: Path) -> None:
    smaller = model(tmp_path, "teacher-sort", vocab_size=100)
    problems = found("loss.top_k=101", f"teachers.sort.model={smaller}")
    assert ("loss.top_k", "at most 100") in {(p.key, p.remedy) for p in problems}


def problems(support: str, *overrides: str) -> list[Problem]:
    """Of a divergence over this support."""
    base = config(*overrides)
    loss = base.loss.model_copy(update={"support": support})
    return preflight(base.model_copy(update={"loss": loss}), "c.yaml", 0).problems


@pytest.mark.parametrize("support", ["student_topk", "full_vocab"])
def test_teachers_whose_head_can_be_loaded_are_taken(support: str) -> None:
    assert problems(support) == []


def test_every_teacher_whose_logits_take_another_path_is_named(tmp_path: Path) -> None:
    models = [
        f"teachers.{name}.model={model(tmp_path, f'teacher-{name}', dim_model_base=64)}"
        for name in ("sort", "reverse")
    ]
    keys = [problem.key for problem in problems("full_vocab", *models)]
    assert keys == ["teachers.sort.model", "teachers.reverse.model"]


@pytest.mark.parametrize("support", ["teacher_topk", "student_topk"])
def test_a_teacher_whose_engine_has_the_head_may_compute_logits_its_own_way(
    tmp_path: Path, support: str
) -> None:
    path = model(tmp_path, "teacher-sort", dim_model_base=64)
    assert problems(support, f"teachers.sort.model={path}") == []


@pytest.mark.parametrize("cut", ["top_p=0.9", "top_k=20", "min_p=0.1"])
def test_the_students_top_k_needs_the_whole_distribution(cut: str) -> None:
    (problem,) = problems("student_topk", f"rollout.{cut}")
    assert problem.key == f"rollout.{cut.partition('=')[0]}"


LONGROPE = {"rope_type": "longrope", "original_max_position_embeddings": 24}


def test_a_response_beyond_what_an_engine_takes_of_a_longrope_model_is_refused(
    tmp_path: Path,
) -> None:
    """By default vLLM takes its original positions."""
    long = {"rope_parameters": LONGROPE, "original_max_position_embeddings": 24}
    student = f"student.model={model(tmp_path, 'student', **long)}"
    problem = one(student, "rollout.max_tokens=24", "eval.max_tokens=8")
    assert problem.key == "rollout.max_tokens"
    assert "has 24 positions" in problem.message


def test_engines_beyond_the_positions_of_a_dynamic_scaling_are_refused(tmp_path: Path) -> None:
    path = model(tmp_path, "student", rope_scaling={"type": "dynamic", "factor": 2.0})
    problem = one(f"student.model={path}", "rollout.engine.max_model_len=256")
    assert problem.key == "rollout.engine.max_model_len"
    assert "dynamic NTK" in problem.message


# ── hub ids ────────────────────────────────────────────────────────────────────────────────────


def in_cache(
    monkeypatch: pytest.MonkeyPatch,
    cache: Path,
    name: str,
    source: Path,
    without: str = "*.safetensors",
) -> None:
    """The files of a model, without its weights, as the hub's client keeps them."""
    import huggingface_hub.constants as constants

    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(cache))
    home = cache / f"models--{name.replace('/', '--')}"
    (home / "refs").mkdir(parents=True)
    (home / "refs" / "main").write_text("abc")
    shutil.copytree(source, home / "snapshots" / "abc", ignore=shutil.ignore_patterns(without))


def test_what_the_cache_has_of_a_hub_id_is_compared(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    in_cache(monkeypatch, tmp_path / "hub", "org/teacher", other_tokenizer(tmp_path))
    problem = one("teachers.sort.model=org/teacher")
    assert problem.key == "teachers.sort.model"
    assert "different tokenizers" in problem.message


@pytest.mark.parametrize("support", ["teacher_topk", "full_vocab"])
def test_a_hub_id_of_which_only_the_weights_are_missing_is_taken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, support: str
) -> None:
    for name in ("student", "teacher-sort"):
        in_cache(monkeypatch, tmp_path / "hub", f"org/{name}", MODELS / name)
    overrides = ("student.model=org/student", "teachers.sort.model=org/teacher-sort")
    assert problems(support, *overrides) == []
    notes = preflight(config(*overrides), "c.yaml", 0).notes
    assert [note.partition(";")[2] for note in notes] == [
        " its files in the local cache are checked"
    ] * 2


@pytest.mark.parametrize(("without", "keys"), [("*.safetensors", []), ("", ["student.model"])])
def test_a_hub_id_whose_weights_are_in_the_cache_is_checked_as_a_directory_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, without: str, keys: list[str]
) -> None:
    """Its end of a response is only known for certain once all of its files are there."""
    path = model(tmp_path, "student", eos_token_id=None)
    change(path / "generation_config.json", {"eos_token_id": None})
    in_cache(monkeypatch, tmp_path / "hub", "org/student", path, without)
    assert [problem.key for problem in found("student.model=org/student")] == keys


def test_a_hub_id_that_is_not_in_the_cache_is_a_note(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    in_cache(monkeypatch, tmp_path / "hub", "org/other", MODELS / "student")
    inputs = preflight(config("teachers.sort.model=org/teacher"), "c.yaml", 0)
    (note,) = inputs.notes
    taken = "teachers.sort.model: org/teacher is not a local directory and is used as a hub id"
    assert note.startswith(
        f"{taken}, for {Path.cwd()} has none of this name; it is not in the local cache"
    )
    assert inputs.problems == []


GPTQ = {"quant_method": "gptq", "bits": 4, "lm_head": True}


def test_a_quantized_head_in_float32_is_refused(tmp_path: Path) -> None:
    path = model(tmp_path, "teacher-sort", quantization_config=GPTQ)
    problem = one(f"teachers.sort.model={path}")
    assert (problem.key, problem.remedy) == ("teachers.sort.engine.head_dtype", "set it to model")
    assert found(f"teachers.sort.model={path}", "teachers.sort.engine.head_dtype=model") == []


@pytest.mark.parametrize("extra", QUANTIZED)
def test_quantized_student_engines_that_are_not_proved_are_a_note(extra: str) -> None:
    settings = config(f"rollout.engine.extra={{{extra}}}", "sync.verify_every=0")
    inputs = preflight(settings, "c.yaml", 0)
    assert inputs.problems == []
    (note,) = (note for note in inputs.notes if note.startswith("rollout.engine.extra: "))
    assert "nothing proves that they have the trainer's weights" in note


@pytest.mark.parametrize(
    "settings",
    [
        {"quantization_config": {"quant_method": "fp8"}},
        {"compression_config": {"quant_method": "compressed-tensors"}},
        {"text_config": {"quantization_config": {"quant_method": "fp8"}}},
    ],
)
def test_a_quantized_student_is_refused_while_its_engines_are_to_be_proved(
    tmp_path: Path, settings: dict[str, Any]
) -> None:
    student = f"student.model={model(tmp_path, 'student', **settings)}"
    assert [problem.key for problem in found(student)] == ["student.model"]
    assert found(student, "sync.verify_every=0") == []


@pytest.mark.parametrize(
    "extra",
    ["rollout.engine.extra={kv_cache_dtype: fp8, quantization: null}"]
    + [f"teachers.sort.engine.extra={{{extra}}}" for extra in QUANTIZED],
)
def test_quantized_teachers_and_caches_leave_the_proof_as_it_is(extra: str) -> None:
    assert found(extra) == []


def test_a_token_that_differs_is_named(tmp_path: Path) -> None:
    message = one(f"teachers.sort.model={other_tokenizer(tmp_path)}").message
    assert re.search(r"\(token '[12]' is \d+ in teacher-sort, \d+ in student\)", message)


def test_a_response_that_leaves_no_room_says_how_long_it_may_be() -> None:
    problem = found("rollout.max_tokens=500")[0]
    assert problem.remedy == "at most 127 less the tokens of the longest prompt"
