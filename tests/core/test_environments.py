"""How an environment's opening follows the prompt of the row."""

from __future__ import annotations

from typing import Any

import pytest

from async_opd.core.environments import Opening

USER = {"role": "user", "content": "Begin."}


@pytest.mark.parametrize(
    ("opening", "prompt", "history"),
    [
        (Opening(), "Begin.", [USER]),
        (Opening(text=" Now."), "Begin.", [{"role": "user", "content": "Begin. Now."}]),
        (
            Opening(text=" Now."),
            [{"role": "system", "content": "Play."}, USER],
            [{"role": "system", "content": "Play."}, {"role": "user", "content": "Begin. Now."}],
        ),
        (
            Opening(text="Now."),
            [{"role": "user", "content": [{"type": "text", "text": "Begin."}]}],
            [
                {
                    "role": "user",
                    "content": [
                        {"type": "text", "text": "Begin."},
                        {"type": "text", "text": "Now."},
                    ],
                }
            ],
        ),
        (Opening(text="Now."), [{"role": "user"}], [{"role": "user", "content": "Now."}]),
        (
            Opening(text="Now."),
            [{"role": "user", "content": None}],
            [{"role": "user", "content": "Now."}],
        ),
        (
            Opening(messages=({"role": "user", "content": "x"},)),
            [USER],
            [USER, {**USER, "content": "x"}],
        ),
    ],
)
def test_a_text_is_a_part_of_the_last_message_and_messages_follow(
    opening: Opening, prompt: Any, history: list[dict[str, Any]]
) -> None:
    assert opening.history(prompt) == history
    assert USER == {"role": "user", "content": "Begin."}
