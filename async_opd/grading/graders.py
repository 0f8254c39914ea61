"""Graders: (response text, row) → 0 to 1, and the answer that they read from the response.

reasoning_gym's verifiers are of two kinds: those that only read a response, and those that may run
it as code (``evaluates``).
"""

from __future__ import annotations

import functools
import importlib
import inspect
import json
import re
from collections.abc import Callable
from contextlib import suppress
from decimal import Context, Decimal
from pathlib import Path
from typing import Any, Self

from async_opd.config.sections.environment import ENVIRONMENT
from async_opd.config.user_code import (
    GRADER_GROUP,
    find_in_file,
    find_user_code,
    module_in,
    names_user_code,
    user_object,
)
from async_opd.core.errors import RolloutFault
from async_opd.core.row import Row, answer_in

REGEX = "regex"
THOUSANDS = r"\d{1,3}(?:,\d{3})+(?!\d)"
NUMBER = re.compile(
    rf"(?<![\d.])[-+]?(?:(?:{THOUSANDS}|\d+)(?:\.\d+)?|(?<!\w)\.\d+)(?:[eE][-+]?\d{{1,3}}(?!\d))?"
)
MINUS = re.compile(r"\u2212|(?<!\d)\u2013(?=\.?\d)")
"""Other signs of a negative number. Between two numbers an en dash stands for a range."""
CURRENCY = re.compile(r"(?<!\d)\\?[$€£](?=\.?\d)")
BEFORE = re.compile(r"(?:\d[-+*/^:,.\u2013]|[\^_]|frac|sqrt|\})\{?$")
AFTER = re.compile(r"(?:[-+*/^:,.\u2013]\{?|[eE][-+]?)\d")
"""Right before or after a number that is a part of something else, as in 3/18, 2^10 and 12,50."""
LETTER = r"[^\W\d_]"
UNIT = re.compile(
    r"(?:\s|~|\\[ ,;:!]|\\?[%$]|°|\^\{?\\circ\}?|\\(?:text|mathrm)\s*\{[^{}]*\}(?:\^\{?[23]\}?)?"
    rf"|(?<=\s){LETTER}++|/?{LETTER}{{2,}}+|(?<={LETTER})[-/]{LETTER}++)*+\.?"
)
"""Text that may follow the number in a box: white space, signs and words.

Possessive: other ways to split the letters of a sentence are never tried, whose number doubles with
each letter.
"""
RETURNS = "a grader must return a number from 0 to 1 for every response"
"""Or that and the extracted answer, as a pair; docs/evaluation.md."""
RANGE = f"{RETURNS}: scale it, or return {{'score': …, 'acc': …}} with acc from 0 to 1"
SAFE_TASKS = frozenset(
    """
    ab acre advanced_geometry aiw arc_1d arc_agi base_conversion basic_arithmetic bf
    binary_alternation bitwise_arithmetic boxnet caesar_cipher calendar_arithmetic chain_sum
    circuit_logic codeio coin_flip color_cube_rotation complex_arithmetic count_bits
    count_primes course_schedule cryptarithm decimal_arithmetic decimal_chain_sum dice
    emoji_mystery family_relationships figlet_font fraction_simplification futoshiki
    game_of_life game_of_life_halting gcd graph_color group_anagrams gsm_symbolic
    isomorphic_strings jugs kakurasu knight_swap knights_knaves largest_island lcm leg_counting
    letter_counting letter_jumble list_functions mahjong_puzzle manipulate_matrix maze
    mini_sudoku modulo_grid needle_haystack number_filtering number_format number_sequence
    number_sorting palindrome_generation palindrome_partitioning path_star polynomial_equations
    pool_matrix power_function prime_factorization products propositional_logic quantum_lock
    ransom_note rearc rectangle_count rotate_matrix rotten_oranges rubiks_cube rush_hour
    self_reference sentence_reordering shortest_path simple_equations simple_geometry sokoban
    spell_backward string_manipulation string_splitting string_synthesis sudoku survo syllogism
    time_intervals tower_of_hanoi tsumego word_ladder word_sequence_reversal word_sorting
    zebra_puzzles
    """.split()  # noqa: SIM905  a list has one name a line
)
"""Tasks of reasoning_gym 0.1.25 whose verifiers parse, compare and count. All other verifiers count
as unsafe: they ``eval`` the response, or pass it to sympy, which does (``composite``: whatever its
tasks do), or belong to a newer version."""

REMEDY = (
    "take another task, or files with a grader of your own; with grading.allow_eval: true these "
    "verifiers run, and a response can run code as you"
)


def evaluates(task: str) -> bool:
    """Whether the verifier of the task may run a response as code."""
    return task not in SAFE_TASKS


class Grade(float):
    """A score from 0 to 1. ``answer`` is what the grader read from the response, if it says so."""

    answer: str | None

    def __new__(cls, score: float, answer: str | None = None) -> Self:
        """The answer of a Grade stays."""
        made = super().__new__(cls, score)
        made.answer = answer if answer is not None else getattr(score, "answer", None)
        return made


Grader = Callable[[str, Row], Any]
"""Returns a number from 0 to 1, or the number and the extracted answer (text, or None)."""


class GradeError(RolloutFault):
    """A grader failed on a row, or returned something else than a number from 0 to 1."""


def load_grader(name: str) -> Callable[[str, Row], Grade]:
    """The grader of ``eval.grader``; reasoning-gym rows by their own verifier.

    Raises ImportError, AttributeError or ValueError if there is no such grader, and what the code
    of a user's file raises.
    """
    chosen = _named(name)

    def grade(response: str, row: Row) -> Grade:
        grader, label = (reasoning_gym, "reasoning_gym") if has_verifier(row) else (chosen, name)
        try:
            value = _grade_of(grader(response, row))
        except MemoryError as error:
            raise GradeError(
                "grader",
                f"{label} needed more memory on row {row.uid} than grading.memory_gb",
                "make it need less, or raise grading.memory_gb",
            ) from error
        except (Exception, SystemExit) as error:
            raise GradeError(
                "grader",
                f"{label} failed on row {row.uid}: {type(error).__name__}: {error}",
                RETURNS,
            ) from error
        if not 0 <= value <= 1:
            raise GradeError(
                "grader", f"{label} returned {value} on row {row.uid}, expected 0 to 1", RANGE
            )
        return value

    return grade


def _grade_of(returned: Any) -> Grade:
    """TypeError or ValueError for anything but a number, or a number and an answer.

    Of a dictionary, as verl's functions return, it is ``score``, or ``acc`` in place of a score
    outside of 0 to 1: that of DAPO's function is 1 or -1.
    """
    if isinstance(returned, dict):
        within = "acc" not in returned or 0 <= float(returned["score"]) <= 1
        returned = returned["score" if within else "acc"]
    if not isinstance(returned, tuple):
        return Grade(float(returned), getattr(returned, "answer", None))
    score, answer = returned
    return Grade(float(score), None if answer is None else str(answer))


def has_verifier(row: Row) -> bool:
    """Whether the row's own task grades it, whatever the configured grader."""
    return row.task is not None


def _named(name: str) -> Grader:
    if name in BUILT_IN:
        if name in PACKAGES:
            importlib.import_module(PACKAGES[name])
        return BUILT_IN[name]
    kind, colon, rest = name.partition(":")
    if kind == REGEX and colon:
        return functools.partial(matched, _pattern(rest))
    grader = _function(name)
    if not callable(grader):
        raise ValueError(f"{name} is {type(grader).__name__}, not a function")
    taken = inspect.signature(grader).parameters
    if "solution_str" in taken:
        every = any(one.kind is inspect.Parameter.VAR_KEYWORD for one in taken.values())
        return functools.partial(_compute_score, grader, None if every else frozenset(taken))
    return grader  # type: ignore[no-any-return]


def _pattern(text: str) -> re.Pattern[str]:
    try:
        return re.compile(text)
    except re.error as error:
        raise ValueError(f"{text!r} is not a regular expression: {error}") from error


def is_function(name: str) -> bool:
    """Whether a user's function grades, which may need no answer."""
    return not (name in (*BUILT_IN, ENVIRONMENT) or name.startswith(f"{REGEX}:"))


def find_grader(name: str) -> None:
    """UserCodeError unless the file of a user's grader is there and has it; nothing of it runs."""
    place, function = _place_of(name)
    if place.endswith(".py"):
        find_in_file(Path(place), (function,), name)
    else:
        find_user_code(f"{place}:{function}" if place else name, GRADER_GROUP)


def _place_of(name: str) -> tuple[str, str]:
    """The module or file, and the function; no place for what may be an entry point."""
    place, colon, function = name.rpartition(":")
    return (name, "compute_score") if not colon and name.endswith(".py") else (place, function)


def _function(name: str) -> Any:
    """The function that ``module:function`` or ``file.py:function`` names."""
    place, function = _place_of(name)
    if not place and names_user_code(name, GRADER_GROUP):
        return user_object(name, GRADER_GROUP)
    if not place:
        raise ValueError(
            f"{name!r} is none of {KNOWN}, module:function, file.py:function and an entry point of "
            f"{GRADER_GROUP}"
        )
    if not place.endswith(".py"):
        return getattr(importlib.import_module(place), function)
    return getattr(module_in(Path(place)), function)


def _compute_score(
    function: Callable[..., Any], taken: frozenset[str] | None, response: str, row: Row
) -> Any:
    """The score by a function with verl's arguments, of which it gets those that it has.

    The ground truth is that of verl's files, unchanged, else the row's answer.
    """
    model = row.fields.get("reward_model")
    truth = model.get("ground_truth") if isinstance(model, dict) else None
    given = {
        "data_source": row.data_source,
        "solution_str": response,
        "ground_truth": row.answer if truth is None else truth,
        "extra_info": row.fields.get("extra_info"),
    }
    return function(**{key: value for key, value in given.items() if taken is None or key in taken})


def exact(response: str, row: Row) -> Grade:
    """1 if the response equals the answer, white space around both ignored."""
    found = response.strip()
    return Grade(float(row.answer is not None and found == row.answer.strip()), found)


def gsm8k(response: str, row: Row) -> Grade:
    """1 if the response gives the same number as the answer.

    That is the first number after the last ``####``, unless a box of LaTeX comes before it, else
    the number that is in the last box, else the last number. No other one is read where the text
    after ``####`` or in the box has none, or where that one is a part of something else, as in
    3/18. ValueError if the answer of the row gives no number, or only a part.
    """
    expected = _number(str(row.answer), whole=True)
    if expected is None:
        raise ValueError(f"the answer {row.answer!r} has no number that stands alone")
    found = _number(response)
    return Grade(float(found == expected), found)


def _number(text: str, whole: bool = False) -> str | None:
    """The number that a text gives, in digits of which equal numbers have the same.

    ``whole``: it is not a part of something else, where it is the last number of the text either.
    """
    text = CURRENCY.sub("", MINUS.sub("-", text.replace("{,}", ",")))
    after = answer_in(text, "####")
    box = answer_in(after or text, "boxed")
    if box and not (after and NUMBER.match(after)):
        found = NUMBER.match(box)
        taken = found is not None and UNIT.fullmatch(box, found.end()) is not None
    else:
        place = after or text
        numbers = list(NUMBER.finditer(place))
        found = numbers[0 if after else -1] if numbers else None
        taken = not (after or whole) or (found is not None and _is_whole(found))
    if found is None or not taken:
        return None
    value = Decimal(found[0].replace(",", ""))
    return f"{Context(prec=len(found[0])).normalize(value) or Decimal(0):f}"


def _is_whole(number: re.Match[str]) -> bool:
    """Whether a number is not a part of something else."""
    before = BEFORE.search(number.string, 0, number.start())
    return not (before or AFTER.match(number.string, number.end()))


def matched(pattern: re.Pattern[str], response: str, row: Row) -> Grade:
    """1 if the pattern's last match in the response is the answer: its first group, if it has one.

    White space around both is ignored.
    """
    found = None
    for match in pattern.finditer(response):
        found = (match[1] if pattern.groups else match[0]) or ""
    found = None if found is None else found.strip()
    return Grade(float(None not in (found, row.answer) and found == str(row.answer).strip()), found)


def math_verify(response: str, row: Row) -> Grade:
    """1 if both are the same mathematical value; ``grading.timeout_s`` replaces its timeouts."""
    from math_verify import parse, verify

    answer = answer_in(str(row.answer), "####") or str(row.answer)
    bare = "$" not in answer and "\\boxed" not in answer  # math_verify reads LaTeX only in these
    gold = parse(f"${answer}$" if bare else answer, parsing_timeout=None)
    if not gold:
        raise ValueError(f"the answer {row.answer!r} cannot be read as mathematics")
    found = parse(response, parsing_timeout=None)
    score = float(verify(gold, found, timeout_seconds=None))
    return Grade(score, _spelled(found[0]) if found else None)


BUILT_IN: dict[str, Grader] = {"exact": exact, "gsm8k": gsm8k, "math_verify": math_verify}
"""Graders by their names in ``eval.grader``."""
PACKAGES = {"math_verify": "math_verify"}
"""The package of a grader that needs one: it is imported when the grader is loaded."""
KNOWN = ", ".join([*BUILT_IN, f"{REGEX}:PATTERN"])
"""The graders that need no code of the user, for messages."""


def _spelled(value: Any) -> str:
    """A value of sympy as text, of which equal numbers have the same: 72.0 is 72, 50 % is 1/2."""
    from sympy import nsimplify

    if getattr(value, "is_number", False):
        with suppress(ValueError):  # of an integer with more digits than Python writes
            return str(nsimplify(value.doit(), rational=True))
    return str(value)


def reasoning_gym(response: str, row: Row) -> Grade:
    """The score of the row's own task."""
    assert row.task is not None
    task = _task(row.task.name, json.dumps(row.task.options, sort_keys=True))
    found = response.strip()
    return Grade(float(task.score_answer(answer=found, entry=row.fields)), found)


@functools.cache
def _task(name: str, options: str) -> Any:
    """The task with the options with which its rows were made: some verifiers read them."""
    import reasoning_gym as gym

    return gym.create_dataset(name, size=1, seed=0, **json.loads(options))
