"""The answers of an evaluation in a file of the run directory."""

from __future__ import annotations

import json
import stat
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from async_opd.core.errors import StageError
from async_opd.core.samples import DeadLetter
from async_opd.core.sequence import spans_of
from async_opd.grading.evaluation import Answer, EvaluationResult
from async_opd.grading.evaluation_files import EVALS, EvaluationFiles, forget_others
from async_opd.grading.graders import Grade
from async_opd.pictures import MEDIA, Thumbnails
from tests.conftest import make_rollout
from tests.data.pictures import BLUE, RED
from tests.pictures.test_pictures import media


def files(folder: Path, most: int = 1 << 20, in_all: int = 1 << 30) -> EvaluationFiles:
    return EvaluationFiles(folder / EVALS, most, in_all, lambda ids: " ".join(map(str, ids)))


def result(uids: Sequence[str] = ("p/0",), teacher: str = "t") -> EvaluationResult:
    answers = (Answer(make_rollout(uid, teacher, version=3), Grade(0.5, "five")) for uid in uids)
    return EvaluationResult({}, tuple(answers))


def lines(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text().splitlines()]


def test_a_line_has_texts_grade_and_versions_of_an_answer(tmp_path: Path) -> None:
    files(tmp_path).write("step_4", result())
    assert lines(tmp_path / EVALS / "step_4.jsonl") == [
        {
            "uid": "p/0",
            "data_source": "t",
            "prompt": "0 1 2",
            "response": "0 1 2 3",
            "finish_reason": "stop",
            "score": 0.5,
            "extracted": "five",
            "ungraded": None,
            "versions": [[3, 0, 4]],
        }
    ]


def test_the_turns_of_an_episode_are_lines_of_its_response(tmp_path: Path) -> None:
    spans = spans_of((("prompt", 3), ("student", 1), ("tool", 1), ("student", 2)))
    plain = make_rollout(tokens=3)
    then = np.array([7, 5, 8, 9], np.int32)
    episode = replace(plain, continuation=then, spans=spans)
    files(tmp_path).write("step_4", EvaluationResult({}, (Answer(episode, Grade(1.0)),)))
    assert lines(tmp_path / EVALS / "step_4.jsonl")[0]["response"] == "7\n8 9"


def with_image(encoded: bytes, uid: str = "p/0") -> Answer:
    rollout = make_rollout(uid)
    prompt = replace(rollout.prompt, media=(media(encoded),))
    return Answer(replace(rollout, prompt=prompt), Grade(1.0))


def test_a_line_names_the_images_of_its_prompt_whose_thumbnails_are_written(tmp_path: Path) -> None:
    encoded = {media(one).sha256: one for one in (RED, BLUE)}
    kept = Thumbnails(tmp_path / MEDIA, 1 << 20)
    own = replace(files(tmp_path), thumbnails=kept, encoded=encoded)
    own.write("step_4", EvaluationResult({}, (with_image(RED), *result(("q/0",)).answers)))
    first, second = lines(tmp_path / EVALS / "step_4.jsonl")
    assert first["images"] == [
        {"sha256": media(RED).sha256, "nbytes": len(RED), "width": 8, "height": 4}
    ]
    assert "images" not in second
    assert [path.stem for path in (tmp_path / MEDIA).iterdir()] == [media(RED).sha256]
    small = replace(own, folder=tmp_path / "small" / EVALS, most=40)
    assert small.write("step_4", EvaluationResult({}, (with_image(BLUE),))) == 1
    assert len(list((tmp_path / MEDIA).iterdir())) == 1  # what is left out has no thumbnail
    assert replace(small, folder=tmp_path / "none", most=0).write("step_4", result()) == 0
    assert not (tmp_path / "none").exists()  # without room for answers there is no file


def test_an_answer_that_could_not_be_graded_has_the_reason(tmp_path: Path) -> None:
    rollout = make_rollout()
    lost = DeadLetter.of_prompt(rollout.prompt, rollout.uid, "grader", "it raised")
    files(tmp_path).write("step_4", EvaluationResult({}, (Answer(rollout, None, lost),)))
    (line,) = lines(tmp_path / EVALS / "step_4.jsonl")
    assert (line["score"], line["ungraded"]) == (None, "it raised")


def test_a_file_is_replaced_as_a_whole_and_only_its_owner_reads_it(tmp_path: Path) -> None:
    files(tmp_path).write("step_4", result(("p/0", "q/0")))
    files(tmp_path).write("step_4", result(("r/0",)))
    path = tmp_path / EVALS / "step_4.jsonl"
    assert [line["uid"] for line in lines(path)] == ["r/0"]
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert [entry.name for entry in (tmp_path / EVALS).iterdir()] == ["step_4.jsonl"]


def test_a_bounded_file_has_equally_many_answers_of_each_data_source(tmp_path: Path) -> None:
    both = result([f"p{i}/0" for i in range(9)]).answers + result(["q0/0", "q1/0"], "u").answers
    files(tmp_path, 800).write("step_4", EvaluationResult({}, both))
    path = tmp_path / EVALS / "step_4.jsonl"
    assert [line["uid"] for line in lines(path)] == ["p0/0", "q0/0", "p1/0", "q1/0"]
    assert path.stat().st_size <= 800


def test_an_answer_that_does_not_fit_is_counted_and_others_are_written(tmp_path: Path) -> None:
    long = Answer(make_rollout("long/0", "t", tokens=400), Grade(1.0))
    both = (long, *result(("p/0", "q/0")).answers)
    assert files(tmp_path, 800).write("step_4", EvaluationResult({}, both)) == 1
    path = tmp_path / EVALS / "step_4.jsonl"
    assert [line["uid"] for line in lines(path)] == ["p/0", "q/0"]


def test_answers_after_the_last_one_that_fits_are_not_decoded(tmp_path: Path) -> None:
    decoded: list[list[int]] = []

    def decode(ids: list[int]) -> str:
        decoded.append(ids)
        return " ".join(map(str, ids))

    small = EvaluationFiles(tmp_path / EVALS, 800, 1 << 30, decode)
    small.write("step_4", result([f"p{i}/0" for i in range(900)]))
    written = len(lines(tmp_path / EVALS / "step_4.jsonl"))
    assert len(decoded) == 2 * (written + 1)  # the prompt and the response of each


def test_the_oldest_files_make_room_for_the_newest_one(tmp_path: Path) -> None:
    files(tmp_path).write("teachers", result())
    size = (tmp_path / EVALS / "teachers.jsonl").stat().st_size
    for step in (2, 4, 10, 12):
        files(tmp_path, in_all=3 * size).write(f"step_{step}", result())
    left = {path.stem for path in (tmp_path / EVALS).iterdir()}
    assert left == {"teachers", "step_10", "step_12"}
    files(tmp_path, in_all=1).write("step_14", result())
    assert (tmp_path / EVALS / "step_14.jsonl").exists()  # the newest one stays


def test_a_file_that_cannot_be_written_ends_the_run_with_its_name(tmp_path: Path) -> None:
    (tmp_path / EVALS).write_text("in the way")
    with pytest.raises(StageError, match=r"step_4\.jsonl cannot be written"):
        files(tmp_path).write("step_4", result())


def test_files_of_steps_that_the_metrics_do_not_have_are_removed(tmp_path: Path) -> None:
    for name in ("step_0", "step_4", "step_8", "teachers"):
        files(tmp_path).write(name, result())
    forget_others(tmp_path, {0, 4})
    left = {path.stem for path in (tmp_path / EVALS).iterdir()}
    assert left == {"step_0", "step_4", "teachers"}
