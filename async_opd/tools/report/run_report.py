"""``report.html``: all that is worth knowing of one run, on one page.

RecordedRun ──verdict, charts, tables──► sections ──page──► report.html
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable

from async_opd.config.load import dump_config
from async_opd.config.secrets import Redactor
from async_opd.core.reports import Level
from async_opd.files.origin import read_origins
from async_opd.observability.terminal import duration
from async_opd.tools.report.facts import tiles_of
from async_opd.tools.report.page import Section, folded, page, paragraphs, table, text, tiles
from async_opd.tools.report.recorded_run import Message, RecordedRun, left_out
from async_opd.tools.report.run_charts import (
    metric_charts,
    pool_charts,
    sample_timelines,
    wall_time,
)
from async_opd.tools.report.samples import Gallery, answer_sections, token_sections
from async_opd.tools.report.verdict import Verdict

SHOWN = 200
"""Messages and dead letters that a table shows: the last ones."""
_TROUBLE = re.compile(
    r" is ejected: | is being rebuilt| is rebuilt| is gone for good| is replaced|going on after "
    r"|^the trainer has the weights of version |^no weights of version "
    r"|^rollback |^Ray is started again|failed|was skipped|^no checkpoint|resampled: | is nan"
    r"| is inf|expired"
)


def report(run: RecordedRun, verdict: Verdict, prediction: str) -> str:
    """The page. ``prediction`` is the planner's sentence on the verdict's change, or ''."""
    name = run.config.name
    status = run.status.split()[0]
    head = (
        f'<h1>{text(name)} <span class="pill {text(status)}">{text(run.status)}</span></h1>'
        f'<p class="soft">{text(str(run.folder))}</p>'
        f"{paragraphs([left_out(one) for one in run.left_out], 'soft')}{tiles(tiles_of(run))}"
    )
    return page(f"{name} · async_opd report", head, sections(run, verdict, prediction))


def sections(run: RecordedRun, verdict: Verdict, prediction: str) -> list[Section]:
    """All sections, in the order of the page."""
    gallery = Gallery(run.folder)
    pools = [*wall_time(run), *metric_charts(run, "pools"), *pool_charts(run)]
    pools += sample_timelines(run.timelines)
    return [
        Section("verdict", "Verdict", _verdict(run, verdict, prediction)),
        Section("learning", "Learning", _evaluated(run), tuple(metric_charts(run, "learning"))),
        Section("staleness", "Staleness", "", tuple(metric_charts(run, "staleness"))),
        Section("pools", "Pools", "", tuple(pools)),
        *answer_sections(run, gallery),
        *token_sections(run, gallery),
        Section("trouble", "Restarts and dead letters", _trouble(run)),
        Section("reproduce", "Config and how to reproduce", _reproduce(run)),
    ]


def _verdict(run: RecordedRun, verdict: Verdict, prediction: str) -> str:
    error = run.summary.error if run.summary else None
    evidence = "".join(f"<li>{text(line)}</li>" for line in verdict.evidence)
    how = "failed" if run.status == "failed" else f"was {run.status}"
    failed = f"The run {how}: {error}" if error else ""
    return (
        f'<div class="card verdict {text(verdict.kind)}">'
        f"{paragraphs([failed, verdict.headline], 'headline')}"
        f"{paragraphs([verdict.remedy, prediction])}"
        f'<ul class="soft">{evidence}</ul></div>'
    )


def _evaluated(run: RecordedRun) -> str:
    """A table of the first and the last evaluation by source, beside the teachers'."""
    sources = sorted(
        {
            key.split("/", 1)[1].removesuffix("/accuracy")
            for key in run.keys
            if key.startswith(("eval/", "eval_initial/")) and key.endswith("/accuracy")
        }
    )
    if not sources:
        return paragraphs(["The run has no evaluation."], "soft")
    rows = [
        (source, *(_accuracy(run, prefix, source) for prefix in _BEFORE_AFTER))
        for source in sources
    ]
    return table(("source", "before", "after", "teacher"), rows)


_BEFORE_AFTER = ("eval_initial", "eval", "eval_teacher")


def _accuracy(run: RecordedRun, prefix: str, source: str) -> str:
    found = run.series(f"{prefix}/{source}/accuracy")
    return f"{found[-1][1]:.1%}" if found else "–"


def _trouble(run: RecordedRun) -> str:
    started = run.messages[0].time if run.messages else 0.0
    found = [message for message in run.messages if _TROUBLE.search(message.text)]
    html = paragraphs(
        [
            f"{len(found)} events of replicas, checkpoints and the run itself"
            f"{_last(found)}, {len(run.roll_backs)} rollbacks, "
            f"{len(run.dead_letters)} dead letters{_last(run.dead_letters)}.",
            _left_out(run.config.log.level),
        ]
    )
    if found:
        rows = [(_since(one, started), one.text) for one in found[-SHOWN:]]
        html += table(("after", "event"), rows)
    if run.dead_letters:
        counts = Counter((one.stage, one.teacher) for one in run.dead_letters)
        counted = [(*key, str(count)) for key, count in counts.most_common()]
        html += table(("stage", "teacher", "dead letters"), counted)
        letters = [(one.uid, one.stage, one.reason) for one in run.dead_letters[-SHOWN:]]
        html += table(("sample", "stage", "reason"), letters)
    return html


def _left_out(level: Level) -> str:
    """The events that ``run.log`` lacks, by the least level that the run has logged."""
    if level == "info":
        return ""
    return f"Events below this level are not in run.log, whose log.level is {level}."


def _last(found: Iterable[object]) -> str:
    return f" (the last {SHOWN} are shown)" if len(list(found)) > SHOWN else ""


def _since(message: Message, started: float) -> str:
    return duration(max(message.time - started, 0.0))


def _reproduce(run: RecordedRun) -> str:
    origins = read_origins(run.folder)
    html = "" if origins else paragraphs(["The run was made before origin.json was written."])
    for number, origin in enumerate(origins, 1):
        part = f"Part {number} of {len(origins)}: " if len(origins) > 1 else ""
        versions = ", ".join(f"{name} {found}" for name, found in origin.versions.items())
        commit = f"; commit {origin.commit}" if origin.commit else ""
        html += f'<pre tabindex="0">{text(origin.command)}</pre>'
        html += paragraphs([f"{part}{versions}{commit}"], "soft")
    html += paragraphs(
        [
            "config.yaml in the run directory has every key, also those that were defaults: "
            "async_opd run RUN_DIR/config.yaml --run-dir NEW_DIR starts the same run again."
        ]
    )
    hide = Redactor()  # not the variables that a stranger's config names: it could ask for values
    return html + folded("The whole config", hide(dump_config(run.config)))
