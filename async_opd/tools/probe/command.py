"""``async_opd probe CONFIG``: will these teachers teach this student?

Exit codes: 0 it was measured, whatever the verdict; 1 an engine failed; 2 bad config, or a teacher
whose precision has a larger bias than its ``max_bias``.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING

from async_opd.config.overrides import add_overrides, load_given
from async_opd.core.errors import ConfigError, Problem
from async_opd.core.printable import indented
from async_opd.processes.output import write_stderr

if TYPE_CHECKING:
    from async_opd.config.run_config import RunConfig
    from async_opd.tools.probe.figures import Estimate, PairFigures, PositionGap
    from async_opd.tools.probe.verdict import Judgement

PROMPTS = 256


def add_probe(parser: argparse.ArgumentParser) -> None:
    """Measures in minutes, before a run, what each teacher can teach the student.

    On a few hundred prompts of each data source it measures the accuracy of both, how far their
    next tokens are apart on the student's own responses, what of the teacher's mass the student
    reaches, and whether the teacher's template looks wrong. Says in words what it expects of a run,
    and suggests objective, top_k and weights. Starts the engines one after the other, and keeps
    nothing.

      async_opd probe config.yaml
      async_opd probe config.yaml --prompts 500 --json
    """
    parser.add_argument("config", help="YAML file")
    add_overrides(parser)
    what = f"prompts of each data source (default {PROMPTS})"
    parser.add_argument("--prompts", type=int, default=PROMPTS, metavar="N", help=what)
    parser.add_argument("--json", action="store_true", help="print one JSON document instead")
    parser.set_defaults(command=_probe)


def _probe(given: argparse.Namespace) -> int:
    from async_opd.tools.probe.engines import run_engines
    from async_opd.tools.probe.figures import figures_of
    from async_opd.tools.probe.verdict import verdicts

    if given.prompts < 1:
        message = f"found {given.prompts}, a probe asks at least 1"
        raise ConfigError.of("--prompts", message, "name a number")
    config = load_given(given)

    def say(text: str) -> None:
        write_stderr(indented(given.redacted(text)))

    measured = run_engines(config, given.config, given.prompts, say)
    pairs = [figures_of(one) for one in measured]
    judged = verdicts(pairs)
    text = _document(pairs, judged) if given.json else "\n".join(_lines(pairs, judged))
    print(given.redacted(text))
    problems = [one for pair in pairs for one in _refused(pair, config, given.config)]
    if problems:
        raise ConfigError(problems)
    return 0


def _refused(pair: PairFigures, config: RunConfig, where: str) -> Iterator[Problem]:
    """The problem of a teacher whose precision has too large a bias."""
    from async_opd.config.sections.teachers import VllmTeacher

    teacher = config.teachers[pair.teacher]
    if pair.precision is not None and isinstance(teacher, VllmTeacher):
        problem = pair.precision.problem(where, pair.teacher, teacher.max_bias)
        yield from [] if problem is None else [problem]


def _document(pairs: Sequence[PairFigures], judged: Sequence[Judgement]) -> str:
    both = zip(pairs, judged, strict=True)
    found = [asdict(pair) | {"verdict": asdict(verdict)} for pair, verdict in both]
    return json.dumps({"pairs": found}, indent=2, allow_nan=False)


def _lines(pairs: Sequence[PairFigures], judged: Sequence[Judgement]) -> Iterator[str]:
    for pair, verdict in zip(pairs, judged, strict=True):
        score = "none without grades" if verdict.score is None else f"{verdict.score:+.3f}"
        asked = verdict.suggestion
        advice = f"loss.kind={asked.objective} loss.top_k={asked.top_k}"
        weight = f"teachers.{pair.teacher}.weight={asked.weight}"
        without = f"leave {pair.teacher} out for {pair.source}"
        if verdict.kind == "unclear":
            without = f"first --prompts {4 * pair.prompts}"
        yield indented(f"{pair.source}, teacher {pair.teacher}: {verdict.words}")
        yield indented(f"  score        {score}, the expected gain in accuracy")
        yield from (indented(f"  {name:<13}{text}") for name, text in _figures(pair))
        yield indented(f"  suggestion   {advice} {without if asked.weight is None else weight}")
        yield ""


def _figures(pair: PairFigures) -> Iterator[tuple[str, str]]:
    both = f"student {_shown(pair.student_accuracy)}, teacher {_shown(pair.teacher_accuracy)}"
    yield "accuracy", f"{both} of {pair.prompts} prompts"
    gap = f"forward KL {pair.forward:.3g}, reverse {pair.reverse:.3g} nats a token"
    yield "gap", f"{gap}, over {pair.tokens} tokens; floor {pair.floor.mean:.2g}"
    yield "by position", ", ".join(map(_ranged, pair.by_position))
    shares = f"{pair.reach:.1%} of the teacher's mass; top-k overlap {pair.overlap:.1%}"
    yield "reach", f"{shares}, mass in common {pair.shared:.1%}"
    start = pair.start
    first = f"first token {start.token}: teacher {start.teacher:.1%}, student {start.student:.1%}"
    bias = "" if pair.bias is None else f"; bias {pair.bias.mean:+.2g} nats on right responses"
    yield "template", first + bias
    if pair.precision is not None:
        yield "precision", str(pair.precision)
    if pair.own_start is not None and pair.own_later is not None:
        sure = f"{pair.own_start:.2f} nats of their first token, {pair.own_later:.2f} of later ones"
        yield "its answers", f"the teacher's log-probability is {sure}"
    if pair.calls is not None:
        yield "its calls", f"{pair.calls:.1%} of the teacher's calls of tools can be read"
    other = pair.template
    if other is not None and other.accuracy is not None:
        accuracy = f"{other.accuracy.mean:+.1%} ± {other.accuracy.stderr:.1%}"
        yield "own template", f"changes the teacher's accuracy by {accuracy}"


def _ranged(gap: PositionGap) -> str:
    last = "" if gap.first == gap.last else f"-{gap.last}"
    return f"{gap.first}{last}: {gap.forward:.3g}"


def _shown(estimate: Estimate | None) -> str:
    if estimate is None:
        return "unknown (no grader)"
    return f"{estimate.mean:.1%} ± {estimate.stderr:.1%}"
