"""The two quickstart tasks, `sort` and `reverse`, on six digits: prompts, answers, splits.

A prompt is one of 10**6 six-digit strings, held as an integer code. Each task shuffles all codes
with its own seed and cuts the result into `eval`, `train`, `held_out` and `pretraining`, so that
the four are disjoint by construction.
"""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

DIGITS = 6
EVAL_PROMPTS = 256
TRAIN_PROMPTS = 3000
HELD_OUT_PROMPTS = 2048
SPLIT_SEEDS: Mapping[str, int] = {"sort": 101, "reverse": 202}
ROW_ORDER_SEED = 303

Ints = NDArray[np.int64]

_ANSWERS: Mapping[str, Callable[[Ints], Ints]] = {
    "sort": lambda digits: np.sort(digits, axis=1),
    "reverse": lambda digits: digits[:, ::-1].copy(),
}
TASKS: tuple[str, ...] = tuple(_ANSWERS)


@dataclass(frozen=True)
class Split:
    """The codes of one task, cut into four disjoint parts.

    `held_out` measures the models while they are built; `pretraining` is what they learn from.
    """

    eval: Ints
    train: Ints
    held_out: Ints
    pretraining: Ints


def split(task: str) -> Split:
    """Cut the codes of `task`; the same call always gives the same split."""
    codes = np.random.default_rng(SPLIT_SEEDS[task]).permutation(10**DIGITS)
    cuts = np.cumsum([EVAL_PROMPTS, TRAIN_PROMPTS, HELD_OUT_PROMPTS])
    return Split(*np.split(codes, cuts))


def digits_of(codes: Ints) -> Ints:
    """The decimal digits of every code, most significant first: [N] -> [N, 6]."""
    return codes[:, None] // 10 ** np.arange(DIGITS - 1, -1, -1) % 10


def answer_digits(task: str, digits: Ints) -> Ints:
    """The right answer to every row of digits: [N, 6] -> [N, 6]."""
    return _ANSWERS[task](digits)


def prompt_prefix(task: str) -> str:
    """The text of a prompt before its digits; `PROMPT_SUFFIX` follows them."""
    return f"{task} "


PROMPT_SUFFIX = "="


def rows(task: str, codes: Ints) -> list[dict[str, str]]:
    """The data rows of these codes: prompt, answer, data source."""
    digits = digits_of(codes)
    return [
        {
            "prompt": prompt_prefix(task) + "".join(map(str, question)) + PROMPT_SUFFIX,
            "answer": "".join(map(str, answer)),
            "data_source": task,
        }
        for question, answer in zip(digits, answer_digits(task, digits), strict=True)
    ]


def write_data(folder: Path) -> None:
    """Write `train.jsonl` and `eval.jsonl`, the tasks mixed in a fixed random order."""
    splits = {task: split(task) for task in TASKS}
    shuffler = np.random.default_rng(ROW_ORDER_SEED)
    folder.mkdir(parents=True, exist_ok=True)
    for name in ("train", "eval"):
        mixed = [row for task in TASKS for row in rows(task, getattr(splits[task], name))]
        lines = [json.dumps(mixed[i]) + "\n" for i in shuffler.permutation(len(mixed))]
        (folder / f"{name}.jsonl").write_text("".join(lines), encoding="utf-8")
