"""A run with everything a report can show, and hostile texts wherever a run can bring them."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path

from async_opd.core.row import Media
from async_opd.grading.evaluation_files import EVALS
from async_opd.microscope import MICROSCOPE, RecordedTurn, RecordWriter
from async_opd.pictures import MEDIA, Thumbnails
from tests.data.pictures import picture
from tests.microscope.samples import TEXTS
from tests.microscope.samples import record as tokens_of
from tests.pictures.test_pictures import media
from tests.tools.report.simulated import EPOCH, record
from tests.tools.report.test_verdict import balanced, slow_trainer

HOSTILE = (
    "</script><script>document.title='ran'</script><img src=x onerror=\"document.title='ran'\">"
)
SOURCES = ("math", "code", HOSTILE)


def write_full_run(folder: Path, seed: int = 0, factor: float = 1.6, hostile: bool = True) -> Path:
    """A simulated run whose trainer limits, with evaluations, restarts and dead letters."""
    record(folder, slow_trainer(balanced(2, 8, 16), factor), seed)
    sources = SOURCES if hostile else SOURCES[:2]
    rows = [_evaluation("eval_initial", 0, sources), _evaluation("eval_teacher", 0, sources)]
    rows += [_evaluation("eval", step, sources) for step in range(4, 37, 4)]
    with (folder / "metrics.jsonl").open("a", encoding="utf-8") as file:
        file.writelines(json.dumps(row) + "\n" for row in rows)
    text = HOSTILE if hostile else "the grader raised ValueError: no digits"
    with (folder / "run.log").open("a", encoding="utf-8") as file:
        file.write(f"2026-09-21T14:13:40 student/1 is ejected: its engine died: {text}\n")
        file.write("2026-09-21T14:13:52 student/1 is rebuilt\n")
    letters = [
        {"time": EPOCH, "uid": f"0:{i}#0/0", "teacher": "a", "tokens": 9, "stage": "grader"}
        for i in range(3)
    ]
    lines = (json.dumps({**letter, "reason": text}) for letter in letters)
    (folder / "dead_letters.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")
    origin = {
        "command": f"async_opd run config.yaml 'name={text}'",
        "versions": {"python": "3.11.9", "async-opd": "0.1.0", "torch": "2.13.0"},
        "commit": "8d1f3a0c5c7e0f6b2a4d9e8c7b6a5f4e3d2c1b0a",
    }
    for step in range(1, 7):
        names = dict.fromkeys(TEXTS, text) if hostile and step == 1 else TEXTS
        one = tokens_of(f"0:{step}#0/0", 24, step, step=step, prompt=text)
        images = (pictured(folder, step), Media("0" * 64, 9, 640, 480))[: step % 3]
        turns = (RecordedTurn(0, 0, ""), RecordedTurn(10, 1, text)) if step == 2 else ()
        made = [replace(one, texts=names, images=images, turns=turns)]
        RecordWriter(folder / MICROSCOPE, 0, 1 << 20).write(step, made)
    (folder / EVALS).mkdir()
    answers = [_answer(folder, f"0:{i}#0/0", text, source) for i, source in enumerate(sources)]
    (folder / EVALS / "step_36.jsonl").write_text("".join(answers), encoding="utf-8")
    (folder / "origin.json").write_text(json.dumps([origin]), encoding="utf-8")
    return folder


def pictured(folder: Path, seed: int) -> Media:
    """An image whose thumbnail is in the run directory."""
    encoded = picture(320, 200, ("teal", "navy", "olive")[seed % 3])
    one = media(encoded)
    Thumbnails(folder / MEDIA, 1 << 20).keep([one], {one.sha256: encoded})
    return one


def _answer(folder: Path, uid: str, words: str, source: str) -> str:
    """A line of ``evals/`` of a prompt with two images, one without a thumbnail."""
    images = [pictured(folder, len(source)), Media(words, 9, 64, 48)]
    line = {"uid": uid, "data_source": source, "prompt": f"<image 64 tokens>{words}"}
    line |= {"response": words, "score": 1.0}
    return json.dumps(line | {"images": [image._asdict() for image in images]}) + "\n"


def _evaluation(prefix: str, step: int, sources: tuple[str, ...]) -> dict[str, object]:
    row: dict[str, object] = {"step": step, "time": EPOCH + step, f"{prefix}/seconds": 0.1}
    for index, source in enumerate(sources):
        share = 0.97 if prefix == "eval_teacher" else 1 - 0.9 * math.exp(-step / (8 + 6 * index))
        row[f"{prefix}/{source}/accuracy"] = row[f"{prefix}/{source}/mean@4"] = share
        row[f"{prefix}/{source}/mean@4_stderr"] = (share * (1 - share) / 64) ** 0.5
        row[f"{prefix}/{source}/pass@4"] = 1 - (1 - share) ** 2
    return row
