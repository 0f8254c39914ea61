"""Sources, the prompt stream and text."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from async_opd.config.sections.data import DataConfig
from async_opd.core.errors import SourceError
from async_opd.core.row import Row
from async_opd.data.files import FileSource
from async_opd.data.prompts import PromptStream
from async_opd.data.reasoning_gym import ReasoningGymSource
from async_opd.data.stored_rows import StoredRows, read_source
from async_opd.grading.graders import load_grader
from async_opd.models.tokenizer import Text, eos_ids
from tests.properties import examples

ROWS = [{"prompt": f"p{i}", "answer": i, "data_source": "a"} for i in range(3)]
DATA = DataConfig(train=[])


def read(path: Path, data: DataConfig = DATA) -> StoredRows:
    return read_source(FileSource(path=str(path)), 0, data)


def test_parquet_is_read(tmp_path: Path) -> None:
    import pyarrow as pa
    import pyarrow.parquet as parquet

    parquet.write_table(pa.Table.from_pylist(ROWS), tmp_path / "rows.parquet")
    assert [row.prompt for row in read(tmp_path / "rows.parquet")] == ["p0", "p1", "p2"]


def test_a_datasets_directory_is_read(tmp_path: Path) -> None:
    import datasets

    datasets.Dataset.from_list(ROWS).save_to_disk(str(tmp_path / "rows"))
    assert [row.answer for row in read(tmp_path / "rows")] == ["0", "1", "2"]


def test_a_datasets_directory_with_splits_asks_for_one(tmp_path: Path) -> None:
    import datasets

    splits = datasets.DatasetDict({"train": datasets.Dataset.from_list(ROWS)})
    splits.save_to_disk(str(tmp_path / "rows"))
    with pytest.raises(SourceError, match="rows/train"):
        read(tmp_path / "rows")


def test_the_fields_can_have_other_names(tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_text('{"question": "q", "domain": "math"}\n')
    data = DataConfig(train=[], prompt="question", route_by="domain")
    assert read(tmp_path / "rows.jsonl", data)[0].data_source == "math"


def test_reasoning_gym_makes_rows_that_its_own_verifier_grades() -> None:
    source = ReasoningGymSource(kind="reasoning_gym", task="basic_arithmetic", size=3, seed=1)
    row = read_source(source, 0, DATA)[1]
    assert load_grader("exact")(str(row.answer), row) == 1.0


def test_an_unknown_reasoning_gym_task_is_refused() -> None:
    source = ReasoningGymSource(kind="reasoning_gym", task="no_such_task")
    with pytest.raises(SourceError, match="no_such_task"):
        read_source(source, 0, DATA)


def stream(cursor: int = 0, weights: tuple[float, ...] = (1.0, 1.0), seed: int = 0) -> PromptStream:
    sources = [
        [Row(f"{s}:{i}", f"source{s}", f"{s}{i}", None, {}) for i in range(3 + s)]
        for s in range(len(weights))
    ]
    encode: Any = lambda prompt: [len(prompt)]  # noqa: E731
    return PromptStream(sources, weights, encode, lambda source: source, seed=seed, cursor=cursor)


def uids(prompts: list[Any]) -> list[str]:
    return [prompt.uid for prompt in prompts]


@examples(50)
@given(st.integers(0, 40), st.integers(0, 20), st.integers(0, 5))
def test_a_stream_goes_on_exactly_where_its_cursor_was(before: int, after: int, seed: int) -> None:
    whole = uids(stream(seed=seed).next(before + after))
    assert uids(stream(before, seed=seed).next(after)) == whole[before:]


def test_every_row_comes_once_an_epoch() -> None:
    taken = uids(stream(weights=(1.0,)).next(6))
    assert sorted(taken) == sorted(f"0:{i}#{epoch}" for epoch in (0, 1) for i in range(3))


def test_epochs_are_shuffled_anew() -> None:
    taken = [uid.split("#")[0] for uid in uids(stream(weights=(1.0, 1e-9)).next(300))]
    assert len({tuple(taken[i : i + 3]) for i in range(0, 300, 3)}) > 1


@examples(50)
@given(st.lists(st.integers(1, 9), min_size=1, max_size=4), st.integers(1, 200))
def test_sources_get_their_share_to_within_one_prompt_each(shares: list[int], count: int) -> None:
    prompts = stream(weights=tuple(map(float, shares))).next(count)
    for index, share in enumerate(shares):
        got = sum(prompt.data_source == f"source{index}" for prompt in prompts)
        assert abs(got - count * share / sum(shares)) < len(shares)


TEMPLATE = (
    "{% for message in messages %}\n<{{ message['role'] }}>{{ message['content'] }}"
    "{% endfor %}\n{% if add_generation_prompt %}<assistant>{% endif %}"
)


@pytest.fixture
def chat_model(tmp_path: Path, quickstart: str) -> Path:
    shutil.copytree(f"{quickstart}/models/student", tmp_path / "chat")
    (tmp_path / "chat" / "chat_template.jinja").write_text(TEMPLATE)
    return tmp_path / "chat"


MESSAGES = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "sort 21="}]


def test_a_chat_template_gives_what_transformers_gives(chat_model: Path) -> None:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(chat_model)
    expected = tokenizer.apply_chat_template(
        MESSAGES, add_generation_prompt=True, tokenize=True, return_dict=False
    )
    assert Text(chat_model).encode(MESSAGES) == expected


def test_a_string_becomes_a_user_message_if_there_is_a_template(chat_model: Path) -> None:
    text = Text(chat_model)
    assert text.encode("21") == text.encode([{"role": "user", "content": "21"}])


def test_never_leaves_the_template_out(chat_model: Path) -> None:
    text = Text(chat_model, "never")
    assert text.decode(text.encode("sort 21=")) == "sort 21="


def test_text_without_a_template_gives_what_transformers_gives(quickstart: str) -> None:
    from transformers import AutoTokenizer

    path = f"{quickstart}/models/student"
    expected = AutoTokenizer.from_pretrained(path).encode("sort 493021=")
    assert Text(path).encode("sort 493021=") == expected


def test_messages_without_a_template_are_refused(quickstart: str) -> None:
    with pytest.raises(ValueError, match="no chat template"):
        Text(f"{quickstart}/models/student").encode(MESSAGES)


def test_the_end_of_sequence_comes_from_the_generation_config(quickstart: str) -> None:
    assert eos_ids(f"{quickstart}/models/student") == (2,)
