"""The mixture stays within one prompt of its weights, also where one source outweighs many."""

from __future__ import annotations

import pytest

from async_opd.core.row import Row
from async_opd.core.samples import DeadLetter, Prompt
from async_opd.data.prompts import PromptStream, filled, to_prompt

WEIGHTS = (0.82, 0.06, 0.06, 0.06)


def test_no_source_is_ever_a_whole_prompt_ahead_of_its_share() -> None:
    sources = [[Row(f"{i}:0", str(i), "x", None, {})] for i in range(len(WEIGHTS))]
    stream = PromptStream(sources, WEIGHTS, lambda _: [1], lambda source: source, seed=0)
    taken = dict.fromkeys(map(str, range(len(WEIGHTS))), 0)
    for step in range(1, 300):
        (prompt,) = stream.next(1)
        assert isinstance(prompt, Prompt)
        taken[prompt.data_source] += 1
        for i, weight in enumerate(WEIGHTS):
            assert abs(taken[str(i)] - weight * step) < 1 + 1e-9


@pytest.mark.parametrize("graded", [True, False])
def test_a_row_goes_with_its_prompt_only_where_it_is_graded(graded: bool) -> None:
    row = Row("0:0", "a", "x", "answer", {})
    stream = PromptStream([[row]], [1.0], lambda _: [1], lambda s: s, seed=0, graded=graded)
    (prompt,) = stream.next(1)
    assert isinstance(prompt, Prompt)
    assert prompt.row == (row if graded else None)


def refuses(text: object) -> list[int]:
    """A tokenizer that some prompts break."""
    if text == "bad":
        raise UnicodeError("no such character")
    return [1] * len(str(text))


def stream(*prompts: str, limit: int | None = None) -> PromptStream:
    rows = [Row(f"0:{i}", "a", prompt, None, {}) for i, prompt in enumerate(prompts)]
    return PromptStream([rows], [1.0], refuses, lambda s: s, seed=0, shuffle=False, limit=limit)


@pytest.mark.parametrize(
    ("prompt", "reason"),
    [
        ("bad", "row 0:1 cannot be tokenized: no such character"),
        ("", "row 0:1 has 0 tokens, at most 3 fit"),
        ("long", "row 0:1 has 4 tokens, at most 3 fit"),
    ],
)
def test_a_row_that_cannot_be_a_prompt_is_lost_with_its_reason(prompt: str, reason: str) -> None:
    made = stream("abc", prompt, "x", limit=3)
    _, lost, after = made.next(3)
    assert made.cursor == 3
    assert isinstance(lost, DeadLetter)
    assert (lost.header.uid, lost.header.teacher, lost.stage) == ("0:1#0", "a", "prompt")
    assert lost.reason == reason
    assert isinstance(after, Prompt)


ROW = Row("0:0", "a", "x", "42", {"prompt": "x", "answer": "42", "hint": [{"role": "user"}]})


def test_a_template_is_filled_with_the_fields_of_the_row_or_is_one_as_it_is() -> None:
    assert filled("{prompt} is {answer}", ROW) == "x is 42"
    assert filled("{hint}", ROW) == [{"role": "user"}]
    with pytest.raises(ValueError, match="'solution', row 0:0 has prompt, answer, hint"):
        filled("{solution}", ROW)


@pytest.mark.parametrize(("teacher", "seen"), [("a", [2]), ("b", None)])
def test_only_teachers_with_templates_read_other_prompts(
    teacher: str, seen: list[int] | None
) -> None:
    def encode(text: object) -> list[int]:
        return [len(str(text))]

    prompt = to_prompt(
        ROW, encode, lambda _: teacher, readers={"a": lambda row: [len(str(row.answer))]}
    )
    assert prompt.token_ids.tolist() == [1]
    assert (None if prompt.teacher_ids is None else prompt.teacher_ids.tolist()) == seen
