"""The committed quickstart models and data are what the quickstart promises."""

import functools
import json
from collections import Counter
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerBase

QUICKSTART = Path(__file__).parents[2] / "examples" / "quickstart"
MODELS = ("teacher-sort", "teacher-reverse", "student")
SOURCES = ("sort", "reverse")
SUBSET = 64
MAX_RESPONSE_TOKENS = 8

Row = dict[str, str]


def rows(name: str) -> list[Row]:
    text = (QUICKSTART / "data" / f"{name}.jsonl").read_text(encoding="utf-8")
    return [json.loads(line) for line in text.splitlines()]


def eval_subset(source: str) -> list[Row]:
    return [row for row in rows("eval") if row["data_source"] == source][:SUBSET]


def right_answer(row: Row) -> str:
    digits = row["prompt"].removeprefix(f"{row['data_source']} ").removesuffix("=")
    assert len(digits) == 6
    assert digits.isdecimal()
    return "".join(sorted(digits)) if row["data_source"] == "sort" else digits[::-1]


def load_tokenizer(name: str = "student") -> PreTrainedTokenizerBase:
    tokenizer = AutoTokenizer.from_pretrained(QUICKSTART / "models" / name)
    assert isinstance(tokenizer, PreTrainedTokenizerBase)
    return tokenizer


@functools.cache
def responses(model_name: str, source: str) -> list[list[int]]:
    """Greedy responses of a saved model to the eval subset, generated in one batch."""
    folder = QUICKSTART / "models" / model_name
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    prompts = [row["prompt"] for row in eval_subset(source)]
    inputs = load_tokenizer(model_name)(prompts, padding=True, return_tensors="pt")
    out = model.generate(**inputs, max_new_tokens=MAX_RESPONSE_TOKENS, do_sample=False)
    found: list[list[int]] = out[:, inputs["input_ids"].shape[1] :].tolist()
    return found


def accuracy(model_name: str, source: str) -> float:
    """The share of responses that are the answer, then end of sequence, then only padding."""
    tokenizer = load_tokenizer(model_name)
    right = 0
    for row, response in zip(eval_subset(source), responses(model_name, source), strict=True):
        answer = [*tokenizer.encode(row["answer"]), tokenizer.eos_token_id]
        padding = [tokenizer.pad_token_id] * (len(response) - len(answer))
        right += response == answer + padding
    return right / SUBSET


def test_train_and_eval_share_no_prompt() -> None:
    train, evaluation = ({row["prompt"] for row in rows(name)} for name in ("train", "eval"))
    assert not train & evaluation


@pytest.mark.parametrize("name", ["train", "eval"])
def test_no_prompt_appears_twice(name: str) -> None:
    prompts = [row["prompt"] for row in rows(name)]
    assert len(prompts) == len(set(prompts))


@pytest.mark.parametrize("name", ["train", "eval"])
def test_every_row_has_exactly_the_three_fields(name: str) -> None:
    assert {tuple(row) for row in rows(name)} == {("prompt", "answer", "data_source")}


@pytest.mark.parametrize("name", ["train", "eval"])
def test_every_answer_is_right(name: str) -> None:
    assert [row["answer"] for row in rows(name)] == [right_answer(row) for row in rows(name)]


@pytest.mark.parametrize(("name", "expected"), [("train", 3000), ("eval", 256)])
def test_every_data_source_has_its_rows(name: str, expected: int) -> None:
    counts = Counter(row["data_source"] for row in rows(name))
    assert counts == dict.fromkeys(SOURCES, expected)


def test_the_tokenizer_gives_back_the_exact_text() -> None:
    text = "sort 493021= a  b , . it's " + "".join(map(chr, range(32, 127)))
    tokenizer = load_tokenizer()
    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_the_tokenizer_makes_one_token_of_each_character_and_adds_none() -> None:
    assert load_tokenizer().convert_ids_to_tokens(load_tokenizer().encode("sort 42=")) == [
        *"sort 42="
    ]


@pytest.mark.parametrize("file", ["tokenizer.json", "tokenizer_config.json"])
def test_the_three_tokenizers_are_identical(file: str) -> None:
    contents = {(QUICKSTART / "models" / name / file).read_bytes() for name in MODELS}
    assert len(contents) == 1


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("file", ["config.json", "generation_config.json"])
def test_a_model_stops_at_the_end_token_of_its_tokenizer(name: str, file: str) -> None:
    config = json.loads((QUICKSTART / "models" / name / file).read_text(encoding="utf-8"))
    assert config["eos_token_id"] == load_tokenizer(name).eos_token_id


@pytest.mark.parametrize("source", SOURCES)
def test_a_teacher_masters_its_own_task(source: str) -> None:
    assert accuracy(f"teacher-{source}", source) >= 0.97


@pytest.mark.parametrize(
    ("name", "source"), [("teacher-sort", "reverse"), ("teacher-reverse", "sort")]
)
def test_a_teacher_is_useless_on_the_other_task(name: str, source: str) -> None:
    assert accuracy(name, source) < 0.10


@pytest.mark.parametrize("source", SOURCES)
def test_the_student_has_much_to_learn(source: str) -> None:
    assert accuracy("student", source) <= 0.30


@pytest.mark.parametrize("source", SOURCES)
def test_the_student_makes_well_formed_attempts(source: str) -> None:
    tokenizer = load_tokenizer()
    texts = [tokenizer.decode(r, skip_special_tokens=True) for r in responses("student", source)]
    well_formed = sum(len(text) == 6 and text.isdecimal() for text in texts)
    assert well_formed / SUBSET >= 0.9


def test_the_manifest_knows_every_model_and_task() -> None:
    text = (QUICKSTART / "models" / "MANIFEST.json").read_text(encoding="utf-8")
    measured = json.loads(text)["accuracy_on_eval"]
    assert {(name, task) for name, tasks in measured.items() for task in tasks} == {
        (name, source) for name in MODELS for source in SOURCES
    }


def test_models_and_data_stay_below_five_megabytes() -> None:
    files = [path for folder in ("models", "data") for path in (QUICKSTART / folder).rglob("*")]
    assert sum(path.stat().st_size for path in files if path.is_file()) < 5_000_000
