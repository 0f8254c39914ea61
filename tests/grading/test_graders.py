"""Graders: answers in every notation, verifiers with their options, errors with a name."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from async_opd.config.sections.data import DataConfig
from async_opd.config.sections.evaluation import EvalConfig
from async_opd.core.row import Row
from async_opd.data.reasoning_gym import ReasoningGymSource
from async_opd.data.stored_rows import read_source
from async_opd.grading.accuracy import majority
from async_opd.grading.graders import BUILT_IN, GradeError, load_grader


def row(answer: str) -> Row:
    return Row("0:7", "a", "p", answer, {})


def test_a_verifier_knows_the_options_its_rows_were_made_with() -> None:
    options = {"min_value": 1, "max_value": 6}
    source = ReasoningGymSource(kind="reasoning_gym", task="puzzle24", size=1, options=options)
    (made,) = read_source(source, 0, DataConfig(train=[]))
    assert load_grader("exact")(str(made.answer), made) == 1.0
    assert load_grader("exact")("9 + 8 + 6 + 1", made) < 1.0  # 24, but of numbers above 6


def own(folder: Path, returned: str, function: str = "f") -> str:
    """The name of a user's grader that returns this."""
    file = folder / "own_grader.py"
    file.write_text(f"def {function}(response, row):\n    return {returned}\n")
    return f"{file}:{function}"


@pytest.mark.parametrize(
    ("returned", "fault"),
    [
        ("float('nan')", "returned nan on row 0:7"),
        ("2", "returned 2"),
        ("1 / 0", "row 0:7: ZeroDivisionError"),
    ],
)
def test_without_a_grade_the_row_is_named(tmp_path: Path, returned: str, fault: str) -> None:
    with pytest.raises(GradeError, match=fault):
        load_grader(own(tmp_path, returned))("x", row("y"))


def test_a_users_grader_may_return_the_answer_that_it_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    own(tmp_path, "0.5, response.upper()")
    monkeypatch.syspath_prepend(tmp_path)
    grade = load_grader("own_grader:f")("x", row("y"))
    assert (grade, grade.answer) == (0.5, "X")


@pytest.mark.parametrize(
    ("name", "answer", "response", "score", "found"),
    [
        ("exact", "4", " 4 \n", 1.0, "4"),
        ("exact", "4", "04", 0.0, "04"),
        ("math_verify", "4", "so it is $4$", 1.0, "4"),
        ("math_verify", "4", "$3$", 0.0, "3"),
        ("math_verify", "4", "I do not know", 0.0, None),
        # in any notation
        ("math_verify", "x^2", "$x^2$", 1.0, "x**2"),
        ("math_verify", "3,4", "$\\{3,4\\}$", 1.0, ...),
        ("math_verify", "1,000", "$1000$", 1.0, "1000"),
        ("math_verify", "$5$", "5", 1.0, "5"),
        ("math_verify", "\\boxed{7}", "7", 1.0, "7"),
        ("math_verify", "so it is\n#### 7", "7", 1.0, "7"),
        # numbers in one form
        ("math_verify", "0.5", "$\\frac{2}{4}$", 1.0, "1/2"),
        ("math_verify", "72", "$0.5$", 0.0, "1/2"),
        ("math_verify", "72", "$50\\%$", 0.0, "1/2"),
        ("math_verify", "72", "$1{,}234.0$", 0.0, "1234"),
        ("math_verify", "72", "$2^{10}$", 0.0, "1024"),
        ("math_verify", "72", "$\\frac{\\sqrt{8}}{2}$", 0.0, "sqrt(2)"),
        ("math_verify", "72", "$1.5\\pi$", 0.0, "3*pi/2"),
        ("math_verify", "72", "$((10^{9})^{99})^{9}$", 0.0, "((10**9)**99)**9"),
    ],
)
async def test_graders_say_in_any_thread_which_answer_they_read(
    name: str, answer: str, response: str, score: float, found: object
) -> None:
    grade = await asyncio.to_thread(load_grader(name), response, row(answer))
    assert (grade, found if found is ... else grade.answer) == (score, found)


@pytest.mark.parametrize(
    ("name", "answer", "response", "score", "found"),
    [
        ("gsm8k", "a 3 b\n#### 1,000", "10-5 … so #### 1000.", 1.0, "1000"),
        ("gsm8k", "72", "first 4, then \\boxed{72} eggs, of 9", 1.0, "72"),
        ("gsm8k", "-72", "it is -72", 1.0, "-72"),
        ("gsm8k", "5", "10-5", 1.0, "5"),
        ("gsm8k", "20", "the answer is (10,20)", 1.0, "20"),
        ("gsm8k", "1", "x = 1,2", 0.0, "2"),
        ("gsm8k", "1000", "1e3", 1.0, "1000"),
        ("gsm8k", "72", "10 + 62 = 72.00", 1.0, "72"),
        ("gsm8k", "-72", "so it is \u221272", 1.0, "-72"),
        ("gsm8k", "1234567.5", "1,234,567.5.", 1.0, "1234567.5"),
        ("gsm8k", "72", "no idea", 0.0, None),
        (r"regex:Answer: (\w+)", "B", "Answer: A? Answer: B", 1.0, "B"),
        (r"regex:\d+", " 12 ", "1 and 12", 1.0, "12"),
        (r"regex:\d+", "12", "none", 0.0, None),
    ],
)
def test_answers_are_read_from_the_ends_of_responses(
    name: str, answer: str, response: str, score: float, found: str | None
) -> None:
    grade = load_grader(name)(response, row(answer))
    assert (grade, grade.answer) == (score, found)


GOES_ON = "the reasoning above is consistent. " * 200


@pytest.mark.parametrize(
    ("answer", "response", "score", "found"),
    [
        ("72", "#### 72\n\nCheck: 48 / 2 = 24, and 48 + 24 is right.", 1.0, "72"),
        ("18", "#### 18 dollars for 2 days", 1.0, "18"),
        ("2", "#### 18 dollars for 2 days", 0.0, "18"),
        ("72", "#### 10 (not 72)", 0.0, "10"),
        ("18", "so \\boxed{\\frac{3}{18}}", 0.0, None),
        ("18", "\\boxed{3/18}", 0.0, None),
        ("18", "\\boxed{x^{18}}", 0.0, None),
        ("18", "#### 3/18", 0.0, None),
        ("3", "#### 3/18", 0.0, None),
        ("18", "#### 3:18", 0.0, None),
        ("10", "#### 2^10", 0.0, None),
        ("10", "#### 2^{10}", 0.0, None),
        ("5", "#### 10-5", 0.0, None),
        ("5", "#### 10\u20135", 0.0, None),
        ("5", "5 #### eight", 0.0, None),
        ("72", "#### \u221272", 0.0, "-72"),
        ("-72", "#### \u221272", 1.0, "-72"),
        ("50", "#### 12,50", 0.0, None),
        ("2", "#### 1,2", 0.0, None),
        ("1234", "#### 1,234.00", 1.0, "1234"),
        ("72", "#### 72.", 1.0, "72"),
        ("0.5", "#### .50", 1.0, "0.5"),
        ("1234", "#### $1,234", 1.0, "1234"),
        ("-1234", "#### -$1,234", 1.0, "-1234"),
        ("100", "#### 1.0e2", 1.0, "100"),
        ("0", "#### -0.0", 1.0, "0"),
        ("72", "#### \\boxed{72}", 1.0, "72"),
        ("72", "72 eggs.\n####", 1.0, "72"),
        ("72", "72 eggs: \\boxed{}", 1.0, "72"),
        ("1", "#### 1e1000", 0.0, None),
        ("-1234.5", "\\boxed{-\\$1{,}234.50}", 1.0, "-1234.5"),
        ("5", "\\boxed{5\\text{ km/h}}, 3 times", 1.0, "5"),
        ("5", "\\boxed{5~\\mathrm{m}^2}", 1.0, "5"),
        ("5", "\\boxed{5 m}", 1.0, "5"),
        ("40", "\\boxed{40\\%}", 1.0, "40"),
        ("90", "\\boxed{90^\\circ}", 1.0, "90"),
        ("5", "\\boxed{5x}", 0.0, None),
        ("5", "\\boxed{x = 5}", 0.0, None),
        ("5", "\\boxed{5, 6}", 0.0, None),
        ("3", "#### $\\frac{3}{18}$", 0.0, None),
        ("3", "#### \\boxed{\\frac{3}{18}}", 0.0, None),
        ("18", "#### x^{18}", 0.0, None),
        ("16", "#### \\sqrt{16}", 0.0, None),
        ("0.5", "#### Rs.500", 0.0, None),
        ("72", "#### **72**", 1.0, "72"),
        ("72", "#### \\text{72} eggs", 1.0, "72"),
        ("72", "#### Step 2\n48 + 24 gives \\boxed{72}", 1.0, "72"),
        ("72", "#### 72\nwhich is 3 times \\boxed{24}", 1.0, "72"),
        ("-72", "#### \u201372", 1.0, "-72"),
        ("33", "\\boxed{033}", 1.0, "33"),
        ("33", "\\boxed{+033}", 1.0, "33"),
        ("0", "\\boxed{-0}", 1.0, "0"),
        ("0", "\\boxed{000}", 1.0, "0"),
        ("33", "\\boxed{--33}", 0.0, None),
        ("33", "\\boxed{33a}", 0.0, None),
        ("5", "\\boxed{5 km/h}", 1.0, "5"),
        ("5", "\\boxed{\\$5/hour}", 1.0, "5"),
        ("5", "\\boxed{5/x}", 0.0, None),
        ("5", "\\boxed{5-x}", 0.0, None),
        ("42", f"2 + 40 = 42.\n#### 42\n{GOES_ON}", 1.0, "42"),
        ("42", f"the answer is 42 {GOES_ON}", 1.0, "42"),
        ("42", f"{GOES_ON}#### 7\nagain.\n#### 42\n{GOES_ON}", 1.0, "42"),
        ("1234567890123456789", f"{GOES_ON}#### 1234567890123456789", 1.0, "1234567890123456789"),
        ("42", GOES_ON, 0.0, None),
        ("42", f"2 + 40 = 41.\n#### 41\n{GOES_ON}", 0.0, "41"),
        ("1234", f"#### 1,234\n{GOES_ON}", 1.0, "1234"),
        ("18", f"\\boxed{{18 {'a' * 5000}!}}", 0.0, None),  # not in time that doubles a letter
        ("18", "\\boxed{18 chocolate chip cookies remaining altogether, or so}", 0.0, None),
    ],
)
def test_gsm8k_reads_the_first_number_after_the_last_mark_or_a_box_that_is_one_number(
    answer: str, response: str, score: float, found: str | None
) -> None:
    grade = load_grader("gsm8k")(response, row(answer))
    assert (grade, grade.answer) == (score, found)


@pytest.mark.parametrize(
    ("name", "answer"),
    [
        ("gsm8k", "so \\boxed{\\frac{3}{18}}"),
        ("gsm8k", "#### 1/2"),
        ("gsm8k", "1/2"),
        ("gsm8k", "10-5"),
        ("gsm8k", "(10, 20,30)"),
        ("gsm8k", "x^2"),
        ("gsm8k", "none"),
        ("math_verify", ""),
    ],
)
def test_a_row_whose_answer_cannot_be_read_is_an_error_and_not_a_0(name: str, answer: str) -> None:
    with pytest.raises(GradeError, match="has no number" if name == "gsm8k" else "row 0:7"):
        load_grader(name)("#### 2", row(answer))


@pytest.mark.parametrize("answer", ["72", "48 + 24 = 72.", "$72", "72 eggs", "it is 72.00"])
def test_a_rows_answer_may_give_its_number_in_any_form(answer: str) -> None:
    assert load_grader("gsm8k")("#### 72", row(answer)) == 1.0


EQUAL = {
    "gsm8k": ("#### 72", "#### 72.0", "#### 72.00", "#### 71", "#### 71"),
    "math_verify": ("$72$", "$72.0$", "$72.00$", "$71$", "$71$"),
}


@pytest.mark.parametrize("name", EQUAL)
def test_equal_numbers_are_one_vote(name: str) -> None:
    assert majority([load_grader(name)(answer, row("72")) for answer in EQUAL[name]]) == 1.0


VERLS = {
    "def compute_score(data_source, solution_str, ground_truth, extra_info=None):\n"
    "    assert (data_source, extra_info) == ('a', {'index': 3})\n"
    "    return {'score': float(solution_str == ground_truth[0]), 'acc': True}\n",
    "def compute_score(solution_str, ground_truth):\n    return solution_str in ground_truth\n",
    "def compute_score(**of):\n    return of['solution_str'] in of['ground_truth']\n"
    "compute_score.__signature__ = __import__('inspect').Signature(\n"
    "    [__import__('inspect').Parameter('solution_str', 3), "
    "__import__('inspect').Parameter('of', 4)])\n",
    "from __future__ import annotations\nfrom dataclasses import dataclass\n"
    "@dataclass\nclass Found:\n    score: float = 1.0\n"
    "def compute_score(solution_str):\n    return Found().score\n",
}


@pytest.mark.parametrize("code", sorted(VERLS))
def test_verls_functions_grade_with_the_files_ground_truth(tmp_path: Path, code: str) -> None:
    file = tmp_path / "score.py"
    file.write_text(code)
    fields = {"reward_model": {"ground_truth": ["4"]}, "extra_info": {"index": 3}}
    made = Row("0:7", "a", "p", "['4']", fields)
    for name in (f"{file}", f"{file}:compute_score"):
        assert load_grader(name)("4", made) == 1.0


@pytest.mark.parametrize(
    ("returned", "grade"),
    [
        ("{'score': -1.0, 'acc': False}", 0.0),
        ("{'score': 1.0, 'acc': True}", 1.0),
        ("{'score': 2.5, 'acc': True}", 1.0),
        ("{'score': 0.25, 'acc': False}", 0.25),
        ("-1", None),
        ("{'score': -1}", None),
        ("{'score': -1, 'acc': 2}", None),
    ],
)
def test_a_score_outside_of_0_to_1_is_replaced_by_an_accuracy_beside_it_or_refused(
    tmp_path: Path, returned: str, grade: float | None
) -> None:
    (tmp_path / "score.py").write_text(f"def compute_score(solution_str):\n    return {returned}\n")
    grader = load_grader(f"{tmp_path / 'score.py'}")
    if grade is not None:
        assert grader("4", row("4")) == grade
        return
    with pytest.raises(GradeError, match="expected 0 to 1") as caught:
        grader("4", row("4"))
    assert "'acc'" in str(caught.value.remedy)


@pytest.mark.parametrize("name", ["regex:(", "nothing", "/no/such/file.py:f"])
def test_a_grader_that_does_not_exist_is_refused(name: str) -> None:
    with pytest.raises((ValueError, OSError)):
        load_grader(name)


@pytest.mark.parametrize("name", BUILT_IN)
def test_the_config_describes_every_built_in_grader(name: str) -> None:
    assert f"``{name}``" in str(EvalConfig.model_fields["grader"].description)
