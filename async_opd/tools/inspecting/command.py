"""The arguments of ``async_opd inspect``, and which records they ask for."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from difflib import get_close_matches
from typing import TYPE_CHECKING, Any

from async_opd.core.errors import ConfigError

if TYPE_CHECKING:
    from async_opd.files.foreign import Place
    from async_opd.tools.inspecting.view import View
    from async_opd.tools.report.recorded_run import RecordedRun

SHOWN = 20


def add_inspect(parser: argparse.ArgumentParser) -> None:
    """Shows what happened to single tokens of a run with log.microscope.

    It shows log-probabilities of student and teacher, the most probable tokens of both, loss,
    weights, clamps and versions, and what became of the sample. Without UID: an overview by
    teacher. docs/microscope.md says how to find what is wrong.

      async_opd inspect runs/quickstart
      async_opd inspect runs/quickstart --worst gap
      async_opd inspect runs/quickstart --step 12
      async_opd inspect runs/quickstart 0:3#0/1 --by gap
    """
    parser.set_defaults(command=_inspect)
    parser.add_argument("run_dir", metavar="RUN_DIR|URL", help="directory of a run, or its mirror")
    chosen = parser.add_mutually_exclusive_group()
    chosen.add_argument("uid", nargs="?", metavar="UID", help="a sample, as the ledger names it")
    chosen.add_argument("--step", type=int, metavar="N", help="the samples of a step")
    what = "the samples with the worst tokens, and the worst one in full"
    chosen.add_argument("--worst", choices=("loss", "gap", "stale"), help=what)
    what = "what colours the tokens (default: what --worst says, or loss)"
    parser.add_argument("--by", choices=("loss", "gap", "stale"), help=what)
    what = f"tokens or samples in a table (default: {SHOWN})"
    parser.add_argument("--rows", type=int, default=SHOWN, metavar="N", help=what)


def _inspect(given: argparse.Namespace) -> int:
    from async_opd.checkpoint.run_copies import run_at

    with run_at(given.run_dir) as folder:
        return _inspect_in(folder, given)


def _inspect_in(folder: Place, given: argparse.Namespace) -> int:
    from async_opd.microscope import MICROSCOPE, files, unreadable
    from async_opd.tools.inspecting.view import View
    from async_opd.tools.report.recorded_run import read_recorded_run

    run = read_recorded_run(folder)
    steps = sorted({step for step, _ in files(run.folder / MICROSCOPE)})
    if not steps:
        message = "the run has no records of tokens"
        remedy = "set log.microscope.share, for example to 0.01, and run it"
        raise ConfigError.of("log.microscope.share", message, remedy, str(run.folder))
    view = View(run, given.by or given.worst or "loss", given.rows)
    view.lines([f"unreadable: {fault}" for fault in unreadable(run.folder)])
    if given.uid is not None:
        _show_sample(run, view, given.uid)
    elif given.step is not None:
        _show_step(run, view, given.step, steps)
    elif given.worst is not None:
        _show_worst(run, view, given.worst, given.rows)
    else:
        view.overview(steps)
    return 0


def _show_sample(run: RecordedRun, view: View, uid: str) -> None:
    """A sample in full; ConfigError with the nearest uids if it has no record."""
    from async_opd.microscope import records
    from async_opd.tools.report.sample_status import admitted_uids, sample_status

    uids = set[str]()
    found = []
    for record in records(run.folder):
        uids.add(record.uid)
        if record.uid == uid:
            found.append(record)
    if not found:
        status, admitted = sample_status(run, [uid])[uid], admitted_uids(run)
        near = get_close_matches(uid, sorted(uids), n=3, cutoff=0.0)
        message = f"found {uid}, which has no record of its tokens"
        message += f"; its status: {status}" if uid in admitted else " and was never admitted"
        remedy = f"recorded samples near it: {', '.join(near)}"
        raise ConfigError.of("UID", message, remedy, str(run.folder))
    for record in found:
        view.sample(record)


def _show_step(run: RecordedRun, view: View, step: int, steps: Sequence[int]) -> None:
    """The samples of a step; ConfigError with the nearest step if it has no records."""
    from async_opd.microscope import records

    if step not in steps:
        nearest = min(steps, key=lambda one: abs(one - step))
        message = f"found {step}, which has no records; {len(steps)} steps have some"
        raise ConfigError.of("--step", message, f"the nearest is {nearest}", str(run.folder))
    found = list(records(run.folder, [step]))
    view.samples(f"samples of step {step}", found)
    logged = dict(run.series("loss/total")).get(step)
    total = sum(float(one["total"].sum()) for one in found)
    line = f"their summands of the step's loss: {total:.6g}"
    view.lines([line + ("" if logged is None else f"; loss/total of the step: {logged:.6g}")])


def _show_worst(run: RecordedRun, view: View, by: Any, count: int) -> None:
    from async_opd.microscope import records
    from async_opd.tools.report.worst import worst

    found = worst(records(run.folder), by, count)
    view.samples(f"samples with the worst tokens by {by}", found)
    for record in found[:1]:
        view.sample(record)
