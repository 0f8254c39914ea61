"""The answers of evaluations: ``evals/step_N.jsonl``, one line an answer.

    EvaluationResult ──text, at most so many bytes──► evals/<name>.jsonl, replaced as a whole
                                   files of the oldest steps are removed, for the bound of all

A file is on the disk before its evaluation is in the metrics. A resume removes the files whose
evaluations are not in the metrics that it keeps (``forget_others``).
"""

from __future__ import annotations

import json
import re
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from itertools import chain, zip_longest
from pathlib import Path

from async_opd.core.errors import StageError
from async_opd.core.row import Media
from async_opd.core.samples import Rollout
from async_opd.files.foreign import Place, foreign
from async_opd.files.safe_open import make_folder, write_atomically
from async_opd.grading.evaluation import Answer, EvaluationResult
from async_opd.pictures import Thumbnails

EVALS = "evals"
"""The folder of a run directory."""
TEACHERS = "teachers"
"""The name of the evaluation of the teachers."""
THUMBNAILS = 0.5
"""Share of all thumbnails' bytes that evaluations may take."""
_STEP = re.compile(r"step_\d{1,15}")


def of_step(step: int) -> str:
    """The name of the evaluation that is logged at a step."""
    return f"step_{step}"


@dataclass(frozen=True)
class EvaluationFiles:
    """The folder ``evals/``. A file has at most ``most`` bytes, all of them at most ``in_all``.

    ``decode`` makes text of tokens. ``redacted`` hides secrets that a grader's error may quote.
    ``thumbnails`` gets the images of answers that are written, whose ``encoded`` bytes are here.
    """

    folder: Path
    most: int
    in_all: int
    decode: Callable[[list[int]], str]
    redacted: Callable[[str], str] = lambda text: text
    thumbnails: Thumbnails | None = None
    encoded: Mapping[str, bytes] = field(default_factory=dict, repr=False)

    def write(self, name: str, result: EvaluationResult) -> int:
        """Writes the answers that fit, of the data sources by turns; returns how many do not.

        An answer that does not fit is left out; none is tried once seven eighths are full. ``most``
        0: no file. The files of the oldest steps make room for it. StageError.
        """
        if not self.most:
            return 0
        lines, size, images = list[str](), 0, dict[Media, None]()
        for answer in _by_turns(result.answers):
            line = json.dumps(self._line(answer)) + "\n"  # ASCII: as many bytes as characters
            if size + len(line) <= self.most:
                lines.append(line)
                size += len(line)
                images |= dict.fromkeys(_images(answer))
            elif size > self.most - self.most // 8:
                break
        path = self.folder / f"{name}.jsonl"
        try:
            make_folder(self.folder)
            write_atomically(path, "".join(lines))
            self._make_room(path)
        except OSError as error:
            cause = f"{path} cannot be written: {error.strerror or error}"
            remedy = "make room on its disk, or set eval.samples_mib to 0"
            raise StageError("evaluation", cause, remedy) from error
        if self.thumbnails is not None:
            self.thumbnails.keep(images, self.encoded, THUMBNAILS)
        return len(result.answers) - len(lines)

    def _make_room(self, newest: Path) -> None:
        there = (path for path in foreign(self.folder).entries() if path.suffix == ".jsonl")
        sizes = {path: path.stat().st_size for path in there}
        steps = {int(path.stem[5:]): path for path in sizes if re.fullmatch(_STEP, path.stem)}
        for _, path in sorted(steps.items()):
            if sum(sizes.values()) > self.in_all and path.name != newest.name:
                path.remove()
                del sizes[path]

    def _turns(self, rollout: Rollout) -> list[dict[str, str]]:
        """The texts of all tokens after the first prompt, by origin."""
        ids = rollout.token_ids.tolist()
        return [
            {"origin": span.origin, "text": self.decode(ids[span.start : span.end])}
            for span in rollout.spans[1:]
        ]

    def _line(self, answer: Answer) -> dict[str, object]:
        rollout, grade = answer.rollout, answer.grade
        line: dict[str, object] = {
            "uid": rollout.uid,
            "data_source": rollout.prompt.data_source,
            "prompt": self.decode(rollout.prompt.token_ids.tolist()),
            "response": "\n".join(self.decode(one.tolist()) for one in rollout.turns),
            "finish_reason": rollout.finish_reason,
            "score": None if grade is None else float(grade),
            "extracted": None if grade is None else grade.answer,
            "ungraded": None if answer.lost is None else self.redacted(answer.lost.reason),
            "versions": [[one.version, one.start, one.end] for one in rollout.version_spans],
        }
        if rollout.episode is not None:
            line |= {"turns": self._turns(rollout), "episode": rollout.episode._asdict()}
        images = [image._asdict() for image in _images(answer)]
        return line | ({"images": images} if images else {})


def _images(answer: Answer) -> tuple[Media, ...]:
    return answer.rollout.prompt.media + answer.rollout.media


def _by_turns(answers: Sequence[Answer]) -> Iterator[Answer]:
    """The answers, one of each data source after the other."""
    sources: dict[str, list[Answer]] = defaultdict(list)
    for answer in answers:
        sources[answer.rollout.prompt.data_source].append(answer)
    return (one for one in chain.from_iterable(zip_longest(*sources.values())) if one is not None)


def forget_others(run_dir: Place, steps: Collection[int]) -> None:
    """Removes the files of evaluations at other steps than ``steps``. OSError."""
    stay = {of_step(step) for step in steps}
    for path in (foreign(run_dir) / EVALS).entries():
        if fnmatchcase(path.name, "step_*.jsonl") and path.stem not in stay:
            path.remove()
