"""Which charts a run has: learning, teachers, staleness, pools over time, the life of a sample.

RecordedRun ──metrics by key──► Line … ──charts──► Chart
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator

from async_opd.report.charts import Chart, Line, bars, lines, shares_over_time, timeline
from async_opd.report.pool_times import (
    COMPUTING,
    GPUS,
    OTHER,
    PROMPTS,
    ROLLOUTS,
    SCORED,
    SYNC,
    mean,
    pool_times,
    steady_rows,
    total,
)
from async_opd.report.recorded_run import STEP_S, RecordedRun
from async_opd.report.verdict import samples_by_place, spoken

WINDOWS = 60
"""Points of a pool's shares over time: each is the mean of as many steps as that takes."""
_ACCURACY = re.compile(r"eval/(.+)/accuracy")
_SEVERAL = re.compile(r"eval/(.+/(?:pass@(?!1$)|maj@)\d+)")
_SOURCE_LOSS = re.compile(r"source/(.+)/loss")
_LAG = re.compile(r"staleness/lag_(\d{1,3})")
_LENGTH = re.compile(r"source/(.+)/mean_response_tokens")
_TEACHER_LOSS = re.compile(r"teacher/(.+)/loss")
_TEACHER_GAP = re.compile(r"teacher/(.+)/gap")
_AGREEMENT = re.compile(r"teacher/(.+)/agreement")


def learning(run: RecordedRun) -> Iterator[Chart | None]:
    """Evaluations by source, the loss, and per teacher its loss and its gap to the student."""
    yield lines(
        "accuracy",
        "Accuracy by source",
        "Evaluations of the student; bands are one standard error. It should rise, source by "
        "source.",
        list(evaluation_lines(run)),
        y="accuracy",
        form=".0%",
    )
    yield lines(
        "several",
        "Several answers to each prompt",
        "pass@k: at least one of k is correct. maj@n: the most frequent answer is.",
        list(_by_name(run, _SEVERAL)),
        y="share of prompts",
        form=".0%",
    )
    yield lines(
        "loss",
        "Distillation loss",
        "Mean over the response tokens of each step, in nats. It falls, and flattens where the "
        "student has what the teachers can give.",
        [Line("loss", run.series("loss/distillation") or run.series("loss/total"))],
        y="nats",
    )
    yield lines(
        "source-loss",
        "Loss by source",
        "The same, of the tokens of each data source.",
        list(_by_name(run, _SOURCE_LOSS)),
        y="nats",
    )
    yield lines(
        "teacher-loss",
        "Loss by teacher",
        "The same, of the tokens that each teacher scored.",
        list(_by_name(run, _TEACHER_LOSS)),
        y="nats",
    )
    yield lines(
        "teacher-gap",
        "Gap to each teacher",
        "log q(student) − log p(teacher) of sampled tokens, in nats: an estimate of the "
        "reverse KL, 0 where both agree.",
        list(_by_name(run, _TEACHER_GAP)) or list(_by_name(run, _AGREEMENT, sign=-1)),
        y="nats",
    )
    yield lines(
        "lengths",
        "Response length by source",
        "Mean tokens of each step's responses. A length that keeps growing often ends in "
        "truncation.",
        list(_by_name(run, _LENGTH)),
        y="tokens",
    )


def evaluation_lines(run: RecordedRun) -> Iterator[Line]:
    """Accuracy by source, from the evaluation before the first step on."""
    for key in sorted(run.keys):
        if (found := _ACCURACY.fullmatch(key)) is None:
            continue
        points = [*_initial(run, key), *run.series(key)]
        error = next((k for k in run.keys if _is_error_of(k, found[1])), "")
        by_step = dict([*_initial(run, error), *run.series(error)])
        errors = [by_step.get(step, 0.0) for step, _ in points] if by_step else None
        yield Line(found[1], points, errors)


def _initial(run: RecordedRun, key: str) -> list[tuple[int, float]]:
    """What the evaluation before training measured of the same."""
    return run.series(key.replace("eval/", "eval_initial/", 1))


def _is_error_of(key: str, source: str) -> bool:
    """Whether the key is the standard error of the source's accuracy: that of its mean@n."""
    return key.startswith(f"eval/{source}/mean@") and key.endswith("_stderr")


def staleness(run: RecordedRun) -> Iterator[Chart | None]:
    """The histogram of all trained samples, and the mean over time."""
    lags = (_LAG.fullmatch(key) for key in sorted(run.keys))
    counts = {int(found[1]): total(run.steps, found[0]) for found in lags if found}
    trained = sum(counts.values()) or 1.0
    most = max(counts, default=0)
    named = [
        (f"{lag} or more" if lag == 8 else str(lag), counts.get(lag, 0.0) / trained)
        for lag in range(most + 1)
    ]
    yield bars(
        "staleness",
        "Staleness of trained samples",
        "Weight versions between the oldest token of a sample and the weights it trained. About "
        "async.staleness_threshold, and rarely more than one above it.",
        named if counts else [],
        x="versions",
    )
    found = [
        Line("largest", run.series("staleness/max")),
        Line("mean", run.series("staleness/mean")),  # drawn later: both are seen where they meet
    ]
    yield lines(
        "staleness-steps",
        "Staleness over time",
        "Of each step's batch. It rises during the first versions and stays level after them.",
        found,
        y="versions",
    )


def throughput(run: RecordedRun) -> Iterator[Chart | None]:
    """Samples per second, and how each pool spent its time."""
    yield lines(
        "rate",
        "Throughput",
        "Trained samples per second, step by step. It dips in weight syncs.",
        [Line("samples/s", run.series("perf/samples_per_s"))],
        y="samples/s",
    )
    size = -(-len(run.steps) // WINDOWS) or 1
    windows = [run.steps[at : at + size] for at in range(0, len(run.steps), size)]
    found = [(rows[-1].step, pool_times(run, rows)) for rows in windows]
    for index, pool in enumerate(run.pools if found else ()):
        shares = [(float(step), times[index].shares) for step, times in found if times]
        names = [name for name in COLOURED if name in shares[0][1]]
        yield shares_over_time(
            f"pool-{index}",
            f"{spoken(pool)}: computing and waiting".capitalize(),
            "Shares of its time. The pool that limits computes nearly all of the time.",
            names,
            [(step, [share[name] for name in names]) for step, share in shares],
        )


def sample_life(run: RecordedRun) -> Chart | None:
    """The mean life of a sample: its places in order, and how long it is in each.

    By Little's law a sample is in a place for (samples there) / (samples per second), where the
    samples there are means of what was read at the ends of steps. None if nothing was measured.
    """
    rows = steady_rows(run)
    seconds = total(rows, STEP_S)
    trained = run.config.train.batch_size * len(rows)
    finished = sum(row.values.get("rollout/rollouts_per_s", 0) * row.values[STEP_S] for row in rows)
    if not seconds or not finished:
        return None
    each = {
        place: count * seconds / trained for place, count in samples_by_place(run, rows).items()
    }
    each["rollout"] = total(rows, "rollout/request_s") / finished
    step = mean(rows, "train/compute_s") or total(rows, "train/busy_s") / len(rows)
    each["scored"] += max(each["train"] - step, 0.0)
    each["train"] = step
    named = [(what, kind, each[place]) for place, what, kind in PLACES if each[place] > 0]
    spans, now = [], 0.0
    for what, kind, takes in named:
        spans.append((what, kind, now, now + takes))
        now += takes
    working = sum(takes for _, kind, takes in named if kind == WORK)
    return timeline(
        "life",
        "The life of a sample",
        f"On average {now:.3g} s from admission to its training step, {working / now:.0%} of them "
        "at work. The longest wait is before the pool that limits.",
        (WORK, WAIT),
        spans,
    )


COLOURED = (COMPUTING, PROMPTS, ROLLOUTS, SCORED, SYNC, GPUS, OTHER)
"""Shares from below, so that pools have the same colours: of the waits for input each has one."""
WORK, WAIT = "work", "waiting"
PLACES = (
    ("prompts", "waits for a slot", WAIT),
    ("rollout", "is sampled", WORK),
    ("grader", "is graded", WORK),
    ("rollouts", "waits for its teacher", WAIT),
    ("teachers", "is scored", WORK),
    ("scored", "waits for its batch", WAIT),
    ("train", "is trained", WORK),
)


def _by_name(run: RecordedRun, pattern: re.Pattern[str], sign: int = 1) -> Iterable[Line]:
    """A line for each key that the pattern matches, named by its first group, times ``sign``."""
    for key in sorted(run.keys):
        if found := pattern.fullmatch(key):
            yield Line(found[1], [(step, sign * value) for step, value in run.series(key)])
